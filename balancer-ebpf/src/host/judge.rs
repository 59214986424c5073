//! What holds for whatever frame: asserted of those that `fuzz/` makes up and, by the tests, of its corpus. An input is some
//! bytes that say what surrounds the frame, and then the frame. Sums are computed anew here, not by the data plane's code.

use std::{format, vec, vec::Vec};

use balancer_common::{
    Address, FIRST_SNAT_PORT, ICMP, ICMPV6, TCP, Tunnelled, UDP, answer, family, forward, mapped, role,
};

use super::{
    bed::{Bed, datagram, to_client, to_vip},
    buffer::Buffer,
    frame::{ACK, FAMILY, SYN, address},
};
use crate::{
    Verdict,
    parse::parse,
    process,
    unwrap::{Receiver, unwrap},
};

/// Flags in the first byte of an input of [`rewriter`]; the low three bits are the way to the backend.
mod around {
    pub const IPV6: u8 = 0x08;
    pub const FROM_BACKEND: u8 = 0x10;
    pub const HAS_FLOWS: u8 = 0x20;
    pub const IS_ANSWERED: u8 = 0x40;
    pub const OUTSIDE_IPV6: u8 = 0x80;
}

/// The bytes in front of a frame, its own, and how many of these lie in the first buffer.
fn split<const N: usize>(input: &[u8]) -> Option<([u8; N], &[u8], usize)> {
    let (front, frame) = input.split_first_chunk::<N>()?;
    let first = match usize::from(front[N - 1]) {
        0 => frame.len(),
        words => frame.len().min(words * 4),
    };
    Some((*front, frame, first))
}

/// Looks for a flow key. Input: flags (of `around`, the families alone), how many words of 4 bytes the first buffer has (0 = all), frame.
pub fn parser(input: &[u8]) {
    let Some(([flags, _], frame, first)) = split(input) else { return };
    let _family = InFamily::new(flags & around::IPV6 != 0);
    let bed = Bed::new(1);
    let [one, other] = [0x00, 0xff].map(|beyond| {
        let buffer = Buffer::fragmented(frame, first, beyond);
        let parsed = parse(&buffer, &bed.kernel);
        assert_eq!(buffer.bytes(), frame, "parsing writes nothing");
        parsed.map(|parsed| {
            let offset = |address: usize| address - buffer.start();
            let ports = (!parsed.is_rest).then(|| {
                let places = [offset(parsed.ports.addr()), offset(parsed.checksum.addr())];
                assert!(
                    places[0] == parsed.l4 && places[0] + 4 <= first && places[1] + 2 <= first,
                    "{places:?}"
                );
                assert_eq!(frame[places[0]..][..2], parsed.key.source_port);
                assert_eq!(frame[places[0] + 2..][..2], parsed.key.destination_port);
                places
            });
            let l3 = offset(parsed.ip.addr());
            assert!(l3 < parsed.l4 && parsed.l4 <= l3 + parsed.length as usize, "{l3}, {}", parsed.l4);
            assert!(l3 + parsed.length as usize <= frame.len(), "longer than the frame");
            if parsed.key.family == family::IPV4 {
                let ends = [parsed.key.source, parsed.key.destination].concat();
                assert_eq!(frame[l3 + 12..l3 + 20], ends);
            }
            let rest = (parsed.payload, parsed.ttl, parsed.tcp_flags, parsed.is_first_part, parsed.is_rest);
            (parsed.key, ports, l3, parsed.l4, parsed.length, rest)
        })
    });
    assert_eq!(format!("{one:?}"), format!("{other:?}"), "reads past the end");
}

/// Sends a frame through the balancer, and back what comes of it. Input: flags and way (`around`), room in front of the frame,
/// how many words of 4 bytes the first buffer has (0 = all), frame.
pub fn rewriter(input: &[u8]) {
    let Some(([flags, headroom, _], frame, first)) = split(input) else { return };
    let _family = InFamily::new(flags & around::IPV6 != 0);
    let from_backend = flags & around::FROM_BACKEND != 0;
    let [one, other] = [0x00, 0xff].map(|beyond| {
        let bed = bed(flags);
        let (dropped, traffic) = (bed.kernel.dropped(), bed.traffic());
        bed.kernel.ingress.set(if from_backend { 2 } else { 1 });
        let buffer = Buffer::fragmented(frame, first, beyond);
        buffer.headroom.set(usize::from(headroom).min(64));
        let verdict = process(&buffer, &bed.kernel);
        bed.kernel.memory.assert_consistent();
        bed.kernel.assert_active_is_exact();
        let packets = bed.traffic()[0] + bed.traffic()[2] - traffic[0] - traffic[2];
        (verdict, buffer.bytes(), bed.kernel.dropped() - dropped, packets, bed)
    });
    assert_eq!((&one.0, &one.1, one.2, one.3), (&other.0, &other.1, other.2, other.3), "reads past the end");
    let (verdict, output, refused, packets, bed) = one;
    match verdict {
        Verdict::Pass => {
            assert_eq!((refused, packets), (0, 0));
            assert_eq!(output, frame, "passed, and changed");
        }
        Verdict::Drop => {
            assert_eq!(refused, 1, "{:?}", bed.kernel.drops());
            // What was begun and found no room is lost, and nobody sees it.
            if headroom >= 64 && first == frame.len() {
                assert_eq!(output, frame, "refused, and changed: {:?}", bed.kernel.drops());
            }
        }
        // An answer.
        Verdict::Transmit if refused == 1 => {
            let sums = Sums::of(&output[l3_at(&output)..]);
            assert_eq!(
                (sums.header % 0xffff, sums.upper.map(|sum| sum % 0xffff)),
                (0, Some(0)),
                "{output:02x?}"
            );
        }
        Verdict::Transmit | Verdict::Redirect(_) => {
            assert_eq!(refused, 0, "{:?}", bed.kernel.drops());
            assert!(packets <= 1);
            let output = without_tunnel(flags, &output, packets);
            let [mut before, mut after] = [frame, &output].map(|frame| Sums::of(&frame[l3_at(frame)..]));
            if first < frame.len() {
                // What an error quotes may end with the first buffer, for all that can be seen, and its sum lie behind that.
                before.quoted.clear();
                after.quoted.clear();
            }
            assert_eq!(after, before, "wrong by as much as before: {output:02x?}");
            if packets == 1 && !from_backend && first == frame.len() {
                reverse(flags, &bed, frame, &output);
            }
        }
    }
}

/// Takes a frame out of its tunnel. Input: bit 0 = GUE has port 0, how many words of 4 bytes the first buffer has (0 = all), frame.
pub fn unwrapper(input: &[u8]) {
    let Some(([flags, _], frame, first)) = split(input) else { return };
    let host = Host { gue_port: if flags & 1 == 0 { GUE_PORT } else { 0 } };
    let [one, other] = [0x00, 0xff].map(|beyond| {
        let buffer = Buffer::fragmented(frame, first, beyond);
        (unwrap(&buffer, &host), buffer.bytes())
    });
    assert_eq!(one, other, "reads past the end");
    let (what, output) = one;
    match what {
        None | Some(Tunnelled::Malformed | Tunnelled::Untrusted) => assert_eq!(output, frame),
        Some(Tunnelled::Ipip | Tunnelled::Gue) => {
            let (l3, inside) = (l3_at(frame), l3_at(&output));
            assert_eq!((inside, &output[..l3 - 2]), (l3, &frame[..l3 - 2]), "MACs and tags");
            assert!(frame.ends_with(&output[l3..]));
            let version = output[l3] >> 4;
            let ether_type = [output[l3 - 2], output[l3 - 1]];
            assert_eq!(ether_type, if version == 4 { [0x08, 0x00] } else { [0x86, 0xdd] });
            assert!(packet_length(&output[l3..]) <= output.len() - l3);
        }
    }
}

/// Has what this thread builds be of a family for a while.
struct InFamily(u8);

impl InFamily {
    fn new(is_ipv6: bool) -> InFamily {
        InFamily(FAMILY.replace(if is_ipv6 { family::IPV6 } else { family::IPV4 }))
    }
}

impl Drop for InFamily {
    fn drop(&mut self) {
        FAMILY.set(self.0);
    }
}

const GUE_PORT: u16 = 6080;
/// The balancer's end of tunnels, and the backends', in each family.
const OUTSIDE: [[Address; 2]; 2] = [
    [mapped([10, 0, 2, 1]), mapped([10, 0, 2, 11])],
    [
        [0x20, 1, 0xd, 0xb8, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
        [0x20, 1, 0xd, 0xb8, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x11],
    ],
];

/// A backend's end of the tunnels.
struct Host {
    gue_port: u16,
}

impl Receiver for Host {
    fn is_own(&self, address: &Address) -> bool {
        OUTSIDE.iter().any(|[_, backend]| address == backend)
    }

    fn is_trusted(&self, address: &Address) -> bool {
        OUTSIDE.iter().any(|[balancer, _]| address[..15] == balancer[..15])
    }

    fn gue_port(&self) -> [u8; 2] {
        self.gue_port.to_be_bytes()
    }
}

/// `forward::*`, by the low three bits; 4 is `full-nat`.
fn mode(flags: u8) -> u8 {
    match flags & 7 {
        mode @ (forward::DSR | forward::IPIP | forward::GUE) => mode,
        _ => forward::NAT,
    }
}

fn is_tunnel(flags: u8) -> bool {
    matches!(mode(flags), forward::IPIP | forward::GUE)
}

/// A balancer like that, with one backend.
fn bed(flags: u8) -> Bed {
    let mut bed = Bed::new(1);
    let own = [10, 0, 2, 1];
    let backend = &mut bed.kernel.backends[0];
    if is_tunnel(flags) {
        [backend.snat_address, backend.address] = OUTSIDE[usize::from(flags & around::OUTSIDE_IPV6 != 0)];
        backend.snat_prefix = 128;
        backend.tunnel_port = GUE_PORT.to_be_bytes();
    }
    if flags & 7 == 4 {
        backend.snat_address = address(own);
        bed.kernel.roles.insert(address(own), role::LOCAL | role::with_ports_from(FIRST_SNAT_PORT));
    }
    if mode(flags) != forward::NAT {
        bed.kernel.roles.remove(&address(Bed::BACKENDS[0].0));
    }
    bed.set_mode(mode(flags));
    if flags & around::IS_ANSWERED != 0 {
        let services = bed.kernel.services.values_mut();
        services.for_each(|service| service.answers = answer::UNKNOWN_FLOW | answer::NO_BACKEND);
        bed.kernel.sends_icmp.set(true);
    }
    if flags & around::HAS_FLOWS != 0 {
        bed.run(1, &to_vip(SYN).bytes());
        bed.run(1, &datagram().bytes());
        if flags & 7 == 0 {
            bed.run(2, &to_client(0, SYN | ACK).bytes());
        }
        bed.run(1, &to_vip(ACK).bytes());
    }
    bed
}

/// The frame as the backend's kernel gets it.
fn without_tunnel(flags: u8, output: &[u8], packets: u64) -> Vec<u8> {
    if !is_tunnel(flags) || packets == 0 {
        return output.to_vec();
    }
    let outside = Sums::of(&output[l3_at(output)..]);
    assert_eq!(outside.header % 0xffff, 0, "{output:02x?}");
    let buffer = Buffer::new(output);
    let kind = if mode(flags) == forward::IPIP { Tunnelled::Ipip } else { Tunnelled::Gue };
    assert_eq!(unwrap(&buffer, &Host { gue_port: GUE_PORT }), Some(kind), "{output:02x?}");
    buffer.bytes()
}

/// Asserts that what was sent on becomes the client's frame again: where replies cross the balancer, by answering it with itself.
fn reverse(flags: u8, bed: &Bed, input: &[u8], output: &[u8]) {
    let l3 = l3_at(input);
    let ttl = l3 + if input[l3] >> 4 == 4 { 8 } else { 7 };
    let mut restored = output.to_vec();
    if mode(flags) == forward::NAT {
        // The rest of a datagram is known by its first part alone; and what is at its end comes to it.
        if Sums::of(&input[l3..]).is_rest || input[ttl] < 3 {
            return;
        }
        mirror(&mut restored);
        let (verdict, reply) = bed.run(2, &restored);
        assert_eq!(verdict, Verdict::Redirect(0), "{:?}", bed.kernel.drops());
        restored = reply;
        mirror(&mut restored);
        restored[ttl] += 1;
    }
    if mode(flags) != forward::DSR {
        restored[ttl] += 1;
    }
    restored[..12].copy_from_slice(&input[..12]);
    // A sum of 0 has two forms; that it is right, or wrong as before, was seen.
    let mut input = input.to_vec();
    for frame in [&mut input, &mut restored] {
        for place in Sums::of(&frame[l3..]).places {
            frame[l3 + place..][..2].fill(0);
        }
    }
    assert_eq!(restored, input[..restored.len()], "there and back");
    assert!(is_tunnel(flags) || restored.len() == input.len());
}

/// Exchanges source and destination, addresses and ports; no sum changes by it.
fn mirror(frame: &mut [u8]) {
    let l3 = l3_at(frame);
    let sums = Sums::of(&frame[l3..]);
    let (addresses, width) = if frame[l3] >> 4 == 4 { (l3 + 12, 4) } else { (l3 + 8, 16) };
    frame[addresses..addresses + 2 * width].rotate_left(width);
    frame[l3 + sums.l4..][..4].rotate_left(2);
}

fn word(bytes: &[u8], at: usize) -> usize {
    bytes.get(at..at + 2).map_or(0, |word| usize::from(u16::from_be_bytes([word[0], word[1]])))
}

/// Where the IP header of a frame starts, behind at most two tags.
fn l3_at(frame: &[u8]) -> usize {
    let is_tag = |at: usize| [0x8100, 0x88a8].contains(&word(frame, at));
    14 + if !is_tag(12) {
        0
    } else if !is_tag(16) {
        4
    } else {
        8
    }
}

/// Total length that an IP packet says it has.
fn packet_length(packet: &[u8]) -> usize {
    if packet[0] >> 4 == 4 { word(packet, 2) } else { 40 + word(packet, 4) }
}

/// The sums of a packet with their checksums: what is right comes to 0. They are as good as equal where they differ by 0xffff.
#[derive(Debug)]
struct Sums {
    /// Of IPv4's header; of IPv6, 0.
    header: u32,
    /// Of what is behind it, with the pseudo-header, if it has a sum there.
    upper: Option<u32>,
    /// Of a packet that an ICMP error quotes.
    quoted: Vec<Sums>,
    /// Offset of the TCP, UDP or ICMP header.
    l4: usize,
    /// Where the checksums are.
    places: Vec<usize>,
    /// Whether it is a fragment, and not the first.
    is_rest: bool,
}

impl PartialEq for Sums {
    fn eq(&self, other: &Sums) -> bool {
        let Sums { header, upper, quoted, l4, places, is_rest } = self;
        (header % 0xffff, upper.map(|sum| sum % 0xffff), quoted, l4, places, is_rest)
            == (
                other.header % 0xffff,
                other.upper.map(|sum| sum % 0xffff),
                &other.quoted,
                &other.l4,
                &other.places,
                &other.is_rest,
            )
    }
}

impl Sums {
    /// Of a packet, or as much of it as is there.
    fn of(packet: &[u8]) -> Sums {
        let mut sums = Sums { header: 0, upper: None, quoted: vec![], l4: 0, places: vec![], is_rest: false };
        let Some(first) = packet.first() else { return sums };
        let is_ipv4 = first >> 4 == 4;
        let (mut next, addresses) = if is_ipv4 { (9, 12..20) } else { (6, 8..40) };
        let Some(ends) = packet.get(addresses) else { return sums };
        let end = packet_length(packet).min(packet.len());
        sums.l4 = if is_ipv4 { usize::from(first & 15) * 4 } else { 40 };
        if is_ipv4 {
            let Some(header) = packet.get(..sums.l4) else { return sums };
            sums.header = sum(header);
            sums.places.push(10);
            sums.is_rest = word(packet, 6) & 0x1fff != 0;
        }
        // Extension headers (RFC 8200, section 4).
        while let (false, Some(&kind)) = (is_ipv4, packet.get(next)) {
            let size = match (kind, packet.get(sums.l4 + 1)) {
                (0 | 43 | 60, Some(length)) => (usize::from(*length) + 1) * 8,
                (51, Some(length)) => (usize::from(*length) + 2) * 4,
                (44, Some(_)) => {
                    sums.is_rest |= word(packet, sums.l4 + 2) & 0xfff8 != 0;
                    8
                }
                _ => break,
            };
            (next, sums.l4) = (sums.l4, sums.l4 + size);
        }
        let Some(upper) = packet.get(sums.l4..end) else { return sums };
        let (protocol, place) = match packet.get(next) {
            Some(&TCP) => (TCP, 16),
            Some(&UDP) => (UDP, 6),
            Some(&ICMP) if is_ipv4 => (ICMP, 2),
            Some(&ICMPV6) if !is_ipv4 => (ICMPV6, 2),
            _ => return sums,
        };
        let is_bare = protocol == UDP && word(upper, place) == 0;
        if sums.is_rest || is_bare || upper.len() < place + 2 {
            return sums;
        }
        let length = (packet_length(packet) - sums.l4) as u32;
        let pseudo = if protocol == ICMP { 0 } else { sum(ends) + u32::from(protocol) + length };
        sums.upper = Some(sum(upper) + pseudo);
        sums.places.push(sums.l4 + place);
        let is_error = match protocol {
            ICMP => matches!(upper[0], 3 | 11 | 12),
            ICMPV6 => upper[0] < 128,
            _ => false,
        };
        if let (true, Some(quoted)) = (is_error, upper.get(8..)) {
            sums.quoted.push(Sums::of(quoted));
        }
        sums
    }
}

/// The sum of RFC 1071 (section 1), not yet folded.
fn sum(bytes: &[u8]) -> u32 {
    bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0))).sum()
}
