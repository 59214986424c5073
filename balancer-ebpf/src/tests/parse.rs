//! From bytes to a flow key: whatever the bytes are.

use std::{vec, vec::Vec};

use balancer_common::{FlowKey, ICMP, Reason, TCP, UDP};
use proptest::{collection::vec as bytes, prelude::*};

use super::{
    bed::Bed,
    buffer::Buffer,
    cases,
    checksum::frames,
    frame::{ACK, Endpoint, FAMILY, Frame, L4, SYN, from_client, hex, l4_at},
};
use crate::{
    Verdict,
    parse::{Parsed, Unparsed, parse, tcp},
    process,
};

const CLIENT: Endpoint = ([10, 0, 1, 10], 40_000);
const VIP: Endpoint = ([192, 0, 2, 10], 80);

fn syn() -> Frame {
    Frame::tcp(CLIENT, VIP, SYN)
}

/// A frame of each kind and header length.
fn valid_frames() -> Vec<Frame> {
    let lengths = [0, 4, 20, 36, 40];
    let options = lengths.iter().map(|length| Frame { options: vec![1; *length], ..syn() });
    let tcp_options = lengths.iter().map(|length| {
        let l4 = L4::Tcp { flags: SYN, options: vec![1; *length] };
        Frame { l4, payload: vec![9; 3], ..syn() }
    });
    let udp = [0, 1, 30].into_iter().map(|length| Frame::udp(CLIENT, VIP, &vec![5; length]));
    let both = Frame { options: vec![1; 40], l4: L4::Tcp { flags: SYN, options: vec![1; 40] }, ..syn() };
    options.chain(tcp_options).chain(udp).chain([both]).collect()
}

#[test]
fn every_field_is_found() {
    for frame in valid_frames() {
        let input = frame.bytes();
        let bed = Bed::new(1);
        let buffer = Buffer::new(&input);
        let Ok(parsed) = parse(&buffer, &bed.kernel) else { panic!("{frame:?}") };
        let Parsed {
            ethernet,
            ip,
            l4: l4_offset,
            ports,
            checksum,
            key,
            length,
            payload,
            ttl,
            tcp_flags,
            is_first_part,
            is_rest,
            vlan,
        } = parsed;
        let (protocol, flags) = match frame.l4 {
            L4::Tcp { flags, .. } => (TCP, flags),
            L4::Udp { .. } => (UDP, 0),
        };
        let expected = FlowKey {
            source: bed.kernel.short(CLIENT.0),
            destination: bed.kernel.short(VIP.0),
            source_port: CLIENT.1.to_be_bytes(),
            destination_port: VIP.1.to_be_bytes(),
            protocol,
            family: FAMILY.get(),
            reserved: [0; 2],
        };
        assert_eq!(key, expected);
        assert_eq!(
            (length as usize, ttl, tcp_flags, is_first_part || is_rest, vlan),
            (input.len() - 14, 64, flags, false, 0),
            "{frame:?}"
        );
        let offset = |address: usize| address - buffer.start();
        let l4 = l4_at(&input);
        assert_eq!((l4_offset, usize::from(payload)), (l4, frame.payload.len()));
        assert_eq!((offset(ethernet.addr()), offset(ip.addr()), offset(ports.addr())), (0, 14, l4));
        assert_eq!(offset(checksum.addr()), l4 + if protocol == TCP { 16 } else { 6 });
    }
}

/// Runs a frame twice, with different bytes after its end; what becomes of it must not depend on those.
fn run(input: &[u8], first: usize) -> (Verdict, Vec<u8>, Bed) {
    let [one, other] = [0x00, 0xff].map(|beyond| {
        let bed = Bed::new(1);
        let buffer = Buffer::fragmented(input, first, beyond);
        let verdict = process(&buffer, &bed.kernel);
        (verdict, buffer.bytes(), bed)
    });
    assert_eq!((&one.0, &one.1, one.2.kernel.drops()), (&other.0, &other.1, other.2.kernel.drops()));
    one
}

fn is_forwarded(verdict: Verdict) -> bool {
    matches!(verdict, Verdict::Transmit | Verdict::Redirect(_))
}

#[track_caller]
fn assert_refused(input: &[u8], first: usize, reasons: &[(Reason, u64)]) {
    let (verdict, output, bed) = run(input, first);
    let expected = if reasons.is_empty() { Verdict::Pass } else { Verdict::Drop };
    assert_eq!((verdict, bed.kernel.drops().as_slice()), (expected, reasons), "{input:02x?}");
    assert_eq!(output, input);
    assert_eq!(bed.kernel.memory.live().count(), 0);
    assert_eq!(bed.kernel.counted(0), Default::default());
}

#[test]
fn no_truncation_is_forwarded_or_written_to() {
    for frame in valid_frames() {
        let whole = frame.bytes();
        for length in 0..whole.len() {
            // Without a whole IP header, nobody knows whom it was meant for.
            let reasons = if length < 34 { vec![] } else { vec![(Reason::Malformed, 1)] };
            assert_refused(&whole[..length], length, &reasons);
        }
        assert!(is_forwarded(run(&whole, whole.len()).0), "{frame:?}");
    }
}

/// The rest of a frame may lie in other buffers; headers may not.
#[test]
fn headers_must_lie_in_the_first_buffer() {
    for frame in valid_frames() {
        let frame = Frame { payload: vec![3; 100], ..frame };
        let whole = frame.bytes();
        // Of a TCP header, the checksum is the last field that is needed.
        let needed = l4_at(&whole) + if whole[23] == TCP { 18 } else { 8 };
        for first in 0..whole.len() {
            match first {
                0..34 => assert_refused(&whole, first, &[]),
                _ if first < needed => assert_refused(&whole, first, &[(Reason::Malformed, 1)]),
                _ => assert!(is_forwarded(run(&whole, first).0), "{first} bytes of {frame:?}"),
            }
        }
    }
}

/// Every value of each field that says how long something is: taken only if there are that many bytes.
#[test]
fn no_lying_length_is_believed() {
    for frame in valid_frames() {
        let whole = frame.bytes();
        let (l4, length) = (l4_at(&whole), whole.len() - 14);
        let header = l4 - 14;
        let smallest = if whole[23] == TCP { 20 } else { 8 };
        let expect = |input: &[u8], is_right: bool| match is_right {
            true => assert!(is_forwarded(run(input, input.len()).0), "{input:02x?}"),
            false => assert_refused(input, input.len(), &[(Reason::Malformed, 1)]),
        };
        for version in (0..16).filter(|version| *version != 4) {
            let mut input = whole.clone();
            input[14] = input[14] & 15 | version << 4;
            expect(&input, false);
        }
        for ihl in 0..(header / 4) as u8 {
            let mut input = whole.clone();
            input[14] = 0x40 | ihl;
            if ihl < 5 {
                expect(&input, false);
            }
        }
        let tcp_header = if whole[23] == TCP { usize::from(whole[l4 + 12] >> 4) * 4 } else { 8 };
        let udp_length = length - header;
        for total in (0..=length + 2).chain([0x7fff, 0xffff]) {
            let mut input = whole.clone();
            input[16..18].copy_from_slice(&(total as u16).to_be_bytes());
            let needed = if whole[23] == TCP { header + tcp_header } else { header + udp_length };
            expect(&input, (needed.max(header + smallest)..=length).contains(&total));
        }
        if whole[23] == TCP {
            for words in 0..16_u8 {
                let mut input = whole.clone();
                input[l4 + 12] = words << 4;
                expect(&input, words >= 5 && usize::from(words) * 4 <= length - header);
            }
        } else {
            for claimed in (0..=udp_length + 2).chain([0x7fff, 0xffff]) {
                let mut input = whole.clone();
                input[l4 + 4..l4 + 6].copy_from_slice(&(claimed as u16).to_be_bytes());
                expect(&input, (8..=udp_length).contains(&claimed));
            }
        }
    }
}

/// Published packets, as they arrive and as they must leave, with 14 bytes of Ethernet in front.
#[test]
fn known_packets_leave_as_published() {
    let options_of_tcp = Frame { l4: L4::Tcp { flags: SYN, options: vec![1; 40] }, ..syn() }.bytes();
    let moved = super::frame::translated(
        &options_of_tcp,
        Bed::BACKEND_MACS[0],
        Bed::BACKEND_SIDE,
        CLIENT,
        ([10, 0, 2, 11], 8080),
    );
    let rows = [
        (
            "UDP without a sum",
            from_client("4500001e1234000040119b870a00010ac000020a9c400050000a00006869"),
            hex("4500001e123400003f1152870a00010a0a00020b9c401f90000a00006869"),
        ),
        (
            "a UDP sum that becomes 0",
            from_client("4500001e1234000040119b870a00010ac000020a9c400050000a69402cf5"),
            hex("4500001e123400003f1152870a00010a0a00020b9c401f90000affff2cf5"),
        ),
        (
            "IPv4 options",
            from_client(
                "4600002c12340000400606800a00010ac000020a940400009c42005000000001000000005002faf04b4a0000",
            ),
            hex("4600002c123400003f06bd7f0a00010a0a00020b940400009c421f9000000001000000005002faf0e2090000"),
        ),
        (
            "Ethernet padding",
            from_client(
                "450000281234000040069b880a00010ac000020a9c41005001020304000000005002faf047460000eeeeeeeeeeee",
            ),
            hex(
                "45000028123400003f0652880a00010a0a00020b9c411f9001020304000000005002faf0de050000eeeeeeeeeeee",
            ),
        ),
        ("forty bytes of TCP options", options_of_tcp, moved[14..].to_vec()),
    ];
    for (what, input, output) in rows {
        let (verdict, bytes, bed) = run(&input, input.len());
        assert_eq!((verdict, &bytes[14..]), (Verdict::Redirect(1), &output[..]), "{what}");
        assert_eq!((bed.kernel.dropped(), bed.kernel.counted(0).request.packets), (0, 1), "{what}");
        let length = u64::from(u16::from_be_bytes([input[16], input[17]]));
        assert_eq!(bed.kernel.counted(0).request.bytes, length, "{what}");
    }
}

#[test]
fn known_packets_are_refused_as_published() {
    let rows = [
        (
            "IHL 4",
            Some(Reason::Malformed),
            "440000281234000040069c880a00010ac000020a9c41005001020304000000005002faf047460000",
        ),
        ("IHL 15 in 20 bytes", Some(Reason::Malformed), "4f0000281234000040069b880a00010ac000020a"),
        (
            "options that look like the service's port",
            None,
            "4600002c12340000400699330a00010ac000020a010100509c45001600000001000000005002faf04b810000",
        ),
        (
            "12 bytes of TCP",
            Some(Reason::Malformed),
            "450000201234000040069b900a00010ac000020a9c4800500000000100000000",
        ),
        ("UDP length 4", Some(Reason::Malformed), "4500001c1234000040119b890a00010ac000020a9c47005000040000"),
        (
            "total length 1500",
            Some(Reason::Malformed),
            "450005dc12340000400695d40a00010ac000020a9c49005000000001000000005002faf04b430000",
        ),
        (
            "data offset 15",
            Some(Reason::Malformed),
            "450000281234000040069b880a00010ac000020a9c4b00500000000100000000f002faf0ab400000",
        ),
        (
            "TTL 1",
            Some(Reason::TtlExceeded),
            "450000281234000001 06da880a00010ac000020a9c46005000000001000000005002faf04b460000",
        ),
    ];
    for (_, reason, packet) in rows {
        let input = from_client(&packet.replace(' ', ""));
        assert_refused(&input, input.len(), &Vec::from_iter(reason.map(|reason| (reason, 1))));
    }
}

/// What follows a fragment that nobody has seen is refused; what is between others passes.
#[test]
fn fragments_of_others_pass() {
    let fragment = |source, destination, field: [u8; 2]| {
        let mut bytes = Frame::udp(source, destination, &[1; 40]).bytes();
        bytes[20..22].copy_from_slice(&field);
        bytes
    };
    let backend = (Bed::BACKENDS[0].0, 9);
    let stranger = ([10, 9, 9, 9], 9);
    for field in [[0x20, 0], [0x20, 9], [0, 1], [0x1f, 0xff]] {
        assert_refused(&fragment(CLIENT, stranger, field), 82, &[]);
    }
    for field in [[0x20, 9], [0, 1], [0x10, 0], [0x1f, 0xff]] {
        assert_refused(&fragment(CLIENT, VIP, field), 82, &[(Reason::Fragment, 1)]);
        assert_refused(&fragment(backend, stranger, field), 82, &[(Reason::Fragment, 1)]);
    }
    // A first fragment too small for its ports and checksum is worse than a fragment (RFC 1858).
    for (packet, header) in [(syn(), 20), (Frame::udp(CLIENT, VIP, &[1; 40]), 8)] {
        let mut bytes = packet.bytes();
        bytes.resize(100, 0);
        bytes[20] = 0x20;
        bytes[17] = 20 + header - 1;
        assert_refused(&bytes, 100, &[(Reason::Malformed, 1)]);
        bytes[17] = 20 + header;
        assert!(is_forwarded(run(&bytes, 100).0));
    }
    // "Don't fragment" and the reserved bit make no fragment.
    for field in [[0x40, 0], [0x80, 0]] {
        let input = fragment(CLIENT, VIP, field);
        assert!(is_forwarded(run(&input, input.len()).0), "{field:02x?}");
    }
}

/// Which combinations of flags a TCP sends, from RFC 9293: written here as what it must not.
#[test]
fn impossible_flags_are_told() {
    for flags in 0..=u8::MAX {
        let has = |flag: u8| flags & flag != 0;
        let opens_or_ends_twice =
            [tcp::SYN, tcp::FIN, tcp::RST].into_iter().filter(|flag| has(*flag)).count() > 1;
        let is_unacknowledged = !has(ACK) && !has(tcp::SYN) && !has(tcp::RST);
        assert_eq!(tcp::is_possible(flags), !opens_or_ends_twice && !is_unacknowledged, "{flags:#010b}");
    }
}

#[test]
fn what_is_not_ip_to_one_host_is_foreign() {
    let frame = syn().bytes();
    // Who asks for a neighbour is heard.
    let arp = [&frame[..12], &[0x08, 0x06], &frame[14..]].concat();
    assert!(matches!(parse(&Buffer::new(&arp), &Bed::new(1).kernel), Err(Unparsed::Neighbour)));
    for kind in [[0x81, 0x00], [0x88, 0xa8], [0x00, 0x2e]] {
        let input = [&frame[..12], &kind, &frame[14..]].concat();
        assert!(
            matches!(parse(&Buffer::new(&input), &Bed::new(1).kernel), Err(Unparsed::Foreign)),
            "{kind:02x?}"
        );
    }
    for destination in [[0xff; 6], [1, 0, 0x5e, 0, 0, 1], [3, 0, 0, 0, 0, 1]] {
        let input = [&destination, &frame[6..]].concat();
        assert!(
            matches!(parse(&Buffer::new(&input), &Bed::new(1).kernel), Err(Unparsed::Foreign)),
            "{destination:02x?}"
        );
    }
    for protocol in (0..=u8::MAX).filter(|protocol| ![TCP, UDP, ICMP].contains(protocol)) {
        let mut input = frame.clone();
        input[23] = protocol;
        assert!(
            matches!(parse(&Buffer::new(&input), &Bed::new(1).kernel), Err(Unparsed::Foreign)),
            "protocol {protocol}"
        );
    }
}

proptest! {
    #![proptest_config(cases(3_000))]

    #[test]
    fn random_bytes_change_only_when_forwarded(input in bytes(any::<u8>(), 0..120), prefix in 0..=34_usize) {
        // Random bytes alone get no further than their EtherType.
        let mut input = input;
        let syn = syn().bytes();
        let prefix = prefix.min(input.len());
        input[..prefix].copy_from_slice(&syn[..prefix]);
        let (verdict, output, bed) = run(&input, input.len());
        if !is_forwarded(verdict) {
            prop_assert_eq!(output, input);
        }
        prop_assert_eq!(bed.kernel.dropped(), u64::from(verdict == Verdict::Drop));
    }

    #[test]
    fn a_damaged_frame_changes_only_when_forwarded(
        frame in frames(),
        damage in bytes((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in any::<prop::sample::Index>(),
        is_cut: bool,
    ) {
        let flags = match &frame.l4 { L4::Tcp { options, .. } => L4::Tcp { flags: SYN, options: options.clone() }, udp => udp.clone() };
        let mut input = Frame { destination: VIP, l4: flags, ..frame }.bytes();
        for (place, value) in damage {
            let place = place.index(input.len());
            input[place] = value;
        }
        let first = if is_cut { cut.index(input.len()) } else { input.len() };
        let (verdict, output, bed) = run(&input, first);
        prop_assert_eq!(bed.kernel.dropped(), u64::from(verdict == Verdict::Drop));
        if is_forwarded(verdict) {
            // Nothing behind the headers is touched.
            let end = l4_at(&input) + if input[23] == TCP { 18 } else { 8 };
            prop_assert_eq!(&output[end..], &input[end..]);
            prop_assert_eq!(&output[34..l4_at(&input)], &input[34..l4_at(&input)], "options");
        } else {
            prop_assert_eq!(output, input);
        }
    }
}
