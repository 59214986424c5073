//! The other end of the tunnels: what is taken off, what is left alone, and what is refused.

use std::{vec, vec::Vec};

use balancer_common::{Address, Tunnelled, UDP, family, mapped};
use proptest::prelude::*;

use super::{
    bed::to_vip,
    buffer::Buffer,
    cases,
    frame::{FAMILY, Frame, SYN, checksum, l3_at},
};
use crate::unwrap::{Receiver, unwrap};

const GUE_PORT: u16 = 6080;
/// The balancer, somebody else, and this host, in each family.
const BALANCER: [Address; 2] = [mapped([10, 0, 2, 1]), v6(1)];
const STRANGER: [Address; 2] = [mapped([10, 0, 2, 9]), v6(9)];
const HOST: [Address; 2] = [mapped([10, 0, 2, 11]), v6(11)];
const V4: usize = 0;
const V6: usize = 1;

const fn v6(last: u8) -> Address {
    [0x20, 1, 0xd, 0xb8, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]
}

/// A backend that trusts the balancer alone.
struct Backend {
    own: Vec<Address>,
}

impl Receiver for Backend {
    fn is_own(&self, address: &Address) -> bool {
        self.own.contains(address)
    }

    fn is_trusted(&self, address: &Address) -> bool {
        BALANCER.contains(address)
    }

    fn gue_port(&self) -> [u8; 2] {
        GUE_PORT.to_be_bytes()
    }
}

/// A packet on its way in a tunnel (RFC 2003, RFC 2473, RFC 4213; GUE variant 1).
#[derive(Clone)]
struct Wrapped {
    /// The frame whose packet is within, and whose tags are outside.
    inside: Frame,
    outside: usize,
    is_gue: bool,
    source: Address,
    destination: Address,
    ttl: u8,
    /// IPv4's flags and offset.
    fragment: [u8; 2],
    /// IPv4 options outside: a multiple of 4 bytes.
    options: usize,
    gue_port: u16,
    /// What takes the place of the packet within.
    content: Option<Vec<u8>>,
    /// IP protocol number outside, unless it says what is within.
    protocol: Option<u8>,
}

impl Wrapped {
    fn new(outside: usize, is_gue: bool) -> Wrapped {
        Wrapped {
            inside: Frame { payload: vec![7; 11], ..to_vip(SYN) },
            outside,
            is_gue,
            source: BALANCER[outside],
            destination: HOST[outside],
            ttl: 64,
            fragment: [0x40, 0],
            options: 0,
            gue_port: GUE_PORT,
            content: None,
            protocol: None,
        }
    }

    fn inner(&self) -> Vec<u8> {
        let frame = self.inside.bytes();
        self.content.clone().unwrap_or_else(|| frame[l3_at(&frame)..].to_vec())
    }

    fn bytes(&self) -> Vec<u8> {
        let mut content = self.inner();
        let version = content.first().map_or(0, |first| first >> 4);
        let mut protocol = if version == 6 { 41 } else { 4 };
        if self.is_gue {
            protocol = UDP;
            let length = (content.len() as u16 + 8).to_be_bytes();
            let ports = [0xc001_u16.to_be_bytes(), self.gue_port.to_be_bytes()].concat();
            content = [&ports[..], &length, &[0, 0], &content].concat();
        }
        let protocol = self.protocol.unwrap_or(protocol);
        let header = if self.outside == V4 {
            let [high, low] = ((20 + self.options + content.len()) as u16).to_be_bytes();
            let [f0, f1] = self.fragment;
            let first = 0x45 + (self.options / 4) as u8;
            let fixed = [first, 0, high, low, 0, 0, f0, f1, self.ttl, protocol, 0, 0];
            let ends = [&self.source[12..], &self.destination[12..]].concat();
            let mut header = [&fixed[..], &ends, &vec![1; self.options]].concat();
            let sum = checksum(&header);
            header[10..12].copy_from_slice(&sum.to_be_bytes());
            header
        } else {
            let [high, low] = (content.len() as u16).to_be_bytes();
            [&[0x60, 0, 0, 1, high, low, protocol, self.ttl][..], &self.source, &self.destination].concat()
        };
        [self.link(self.outside == V4), header, content].concat()
    }

    /// What the backend's kernel is to see.
    fn unwrapped(&self) -> Vec<u8> {
        let inner = self.inner();
        [self.link(inner[0] >> 4 == 4), inner].concat()
    }

    fn link(&self, is_ipv4: bool) -> Vec<u8> {
        let ether_type = if is_ipv4 { [0x08, 0x00] } else { [0x86, 0xdd] };
        [&self.inside.to[..], &self.inside.from, &self.inside.tags.concat(), &ether_type].concat()
    }
}

/// What becomes of a frame, whatever lies behind its end.
#[track_caller]
fn run(input: &[u8]) -> (Option<Tunnelled>, Vec<u8>) {
    let [one, other] = [0x00, 0xff].map(|beyond| {
        let buffer = Buffer::fragmented(input, input.len(), beyond);
        (unwrap(&buffer, &Backend { own: HOST.to_vec() }), buffer.bytes())
    });
    assert_eq!(one, other);
    one
}

#[track_caller]
fn left_alone(wrapped: &Wrapped) {
    let input = wrapped.bytes();
    assert_eq!(run(&input), (None, input));
}

#[track_caller]
fn refused(wrapped: &Wrapped, what: Tunnelled) {
    let input = wrapped.bytes();
    assert_eq!(run(&input), (Some(what), input));
}

/// Every tunnel, with either family in it.
fn each(check: impl Fn(Wrapped)) {
    for inside in [family::IPV4, family::IPV6] {
        FAMILY.set(inside);
        for outside in [V4, V6] {
            for is_gue in [false, true] {
                check(Wrapped::new(outside, is_gue));
            }
        }
    }
}

#[test]
fn the_packet_within_is_all_that_is_left() {
    let tags = [[0x88, 0xa8, 0, 5], [0x81, 0, 0, 6]];
    each(|wrapped| {
        let kind = if wrapped.is_gue { Tunnelled::Gue } else { Tunnelled::Ipip };
        for count in 0..=2 {
            let inside = Frame { tags: tags[2 - count..].to_vec(), ..wrapped.inside.clone() };
            for options in [0, 8, 40] {
                let wrapped = Wrapped { inside: inside.clone(), options, ..wrapped.clone() };
                assert_eq!(run(&wrapped.bytes()), (Some(kind), wrapped.unwrapped()));
            }
        }
        // The TTL within is the balancer's business, and the one outside was the path's.
        for ttl in [0, 1, 255] {
            let inside = Frame { ttl, ..wrapped.inside.clone() };
            let wrapped = Wrapped { ttl, inside, ..wrapped.clone() };
            assert_eq!(run(&wrapped.bytes()), (Some(kind), wrapped.unwrapped()));
        }
        // Padding goes on; the kernel cuts it off.
        let padded = [wrapped.bytes(), vec![0; 6]].concat();
        assert_eq!(run(&padded), (Some(kind), [wrapped.unwrapped(), vec![0; 6]].concat()));
    });
}

#[test]
fn what_is_not_for_this_host_is_left_alone() {
    each(|wrapped| {
        left_alone(&Wrapped { destination: STRANGER[wrapped.outside], ..wrapped.clone() });
        // Not even who sent it matters then.
        let source = STRANGER[wrapped.outside];
        left_alone(&Wrapped { source, destination: source, ..wrapped.clone() });
        if wrapped.is_gue {
            left_alone(&Wrapped { gue_port: GUE_PORT + 1, ..wrapped.clone() });
        }
        left_alone(&Wrapped { protocol: Some(6), ..wrapped.clone() });
        let tags = vec![[0x88, 0xa8, 0, 5], [0x81, 0, 0, 6], [0x81, 0, 0, 7]];
        let inside = Frame { tags, ..wrapped.inside.clone() };
        left_alone(&Wrapped { inside, ..wrapped });
    });
}

/// The kernel puts them together; the program does not see what comes of it.
#[test]
fn fragments_outside_are_the_kernels_business() {
    each(|wrapped| {
        if wrapped.outside == V4 {
            for fragment in [[0x20, 0], [0, 1], [0x20, 1], [0x1f, 0xff]] {
                left_alone(&Wrapped { fragment, ..wrapped.clone() });
            }
        } else {
            left_alone(&Wrapped { protocol: Some(44), ..wrapped });
        }
    });
}

/// They are packets like others: the backend's kernel puts them together.
#[test]
fn fragments_within_are_unwrapped() {
    FAMILY.set(family::IPV4);
    for (outside, is_gue) in [(V4, false), (V4, true), (V6, false), (V6, true)] {
        let wrapped = Wrapped::new(outside, is_gue);
        let mut content = wrapped.inner();
        content[6] = 0x20;
        content[7] = 3;
        let wrapped = Wrapped { content: Some(content), ..wrapped };
        let kind = if is_gue { Tunnelled::Gue } else { Tunnelled::Ipip };
        assert_eq!(run(&wrapped.bytes()), (Some(kind), wrapped.unwrapped()));
    }
}

#[test]
fn a_stranger_is_refused_whatever_it_sends() {
    each(|wrapped| {
        let source = STRANGER[wrapped.outside];
        refused(&Wrapped { source, ..wrapped.clone() }, Tunnelled::Untrusted);
        refused(&Wrapped { source, content: Some(vec![0; 30]), ..wrapped }, Tunnelled::Untrusted);
    });
}

#[test]
fn what_is_no_whole_packet_is_refused() {
    each(|wrapped| {
        let inner = wrapped.inner();
        let is_ipv4 = inner[0] >> 4 == 4;
        let refused = |content: Vec<u8>, protocol| {
            refused(&Wrapped { content: Some(content), protocol, ..wrapped.clone() }, Tunnelled::Malformed);
        };
        let own = (!wrapped.is_gue).then_some(if is_ipv4 { 4 } else { 41 });
        // As long as it says to be, or refused.
        for length in [0, 1, 5, 6, 19, inner.len() - 1] {
            refused(inner[..length].to_vec(), own);
        }
        let with = |at: usize, value: u8| {
            let mut content = inner.clone();
            content[at] = value;
            content
        };
        // Of no IP version; of GUE, the top bits are the variant: 0 has a header of its own, 2 and 3 do not exist.
        for version in [0, 1, 5, 7, 8, 15] {
            refused(with(0, version << 4 | 5), own);
        }
        if is_ipv4 {
            // A header shorter than any, or longer than the packet.
            refused(with(0, 0x44), own);
            refused([&with(0, 0x4f)[..4], &inner[4..]].concat(), own.filter(|_| inner.len() < 60));
            refused(with(3, 19), own);
        }
        // Another version than the protocol number says.
        if !wrapped.is_gue {
            refused(inner.clone(), Some(if is_ipv4 { 41 } else { 4 }));
        }
        // More than the outer packet has, though the frame goes on.
        let mut input =
            Wrapped { content: Some(inner[..inner.len() - 1].to_vec()), protocol: own, ..wrapped.clone() }
                .bytes();
        input.push(7);
        assert_eq!(run(&input), (Some(Tunnelled::Malformed), input));
    });
}

#[test]
fn no_truncation_is_unwrapped() {
    each(|wrapped| {
        let whole = wrapped.bytes();
        for length in 0..whole.len() {
            let (what, output) = run(&whole[..length]);
            assert!(matches!(what, None | Some(Tunnelled::Malformed)), "{length}: {what:?}");
            assert_eq!(output, whole[..length]);
        }
    });
}

proptest! {
    #![proptest_config(cases(20_000))]

    /// A bit that is turned over outside or within changes nothing that was not taken off.
    #[test]
    fn a_changed_bit_reads_nothing_behind_the_end(bit in 0_usize..2_000, outside in 0..2_usize, is_gue: bool) {
        let mut input = Wrapped::new(outside, is_gue).bytes();
        let bits = input.len() * 8;
        input[bit % bits / 8] ^= 1 << (bit % 8);
        let (what, output) = run(&input);
        match what {
            Some(Tunnelled::Ipip | Tunnelled::Gue) => prop_assert!(input.ends_with(&output[14..])),
            _ => prop_assert_eq!(output, input),
        }
    }
}
