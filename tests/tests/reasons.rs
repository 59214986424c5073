//! Every reason for which a packet is refused, brought about by one packet: counted once, under its own name, and under no other.
//!
//! The packets go through the program in the kernel, but for reasons that only another CPU or a driver without headroom brings
//! about: those go through the same code on the host.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::net::{IpAddr, SocketAddr};

use balancer_common::{
    Backend, FIRST_SNAT_PORT, FlowEntry, MAX_PORTS, NO_TWIN, NextHop, Reason, UDP, ability, flags, forward,
    option,
};
use balancer_ebpf::{
    Verdict, enter,
    host::{
        bed::{self, Bed},
        frame::{self, Frame},
    },
};
use balancer_tests::{
    packet::{self, Path, Segment, hex},
    program::{BACKEND_PORT, BACKEND_SIDE, Program, VIP_PORT, backend_mac, verdict},
    topology::Family,
};
use balancer_user::address::to_wire;
use bytemuck::Zeroable;

const V4: Family = Family::Ipv4;
const V6: Family = Family::Ipv6;

#[test]
fn each_reason_is_counted_for_one_packet_exactly() {
    for reason in Reason::ALL {
        assert_eq!(counted(reason), [(reason, 1)], "{}", reason.name());
    }
}

/// The packet that is refused for this reason, after others that are not; and all that was counted by then.
fn counted(reason: Reason) -> Vec<(Reason, u64)> {
    match reason {
        Reason::Malformed => fresh(V4, |_| tcp(V4, 1, Segment::SYN | Segment::FIN)),
        Reason::Fragment => fresh(V4, |_| {
            [hex("45000224beef00b94011ec0c0a00010ac000020a9c440050").unwrap(), vec![0; 524]].concat()
        }),
        Reason::TtlExceeded => fresh(V4, |_| Path { ttl: 1, ..to_vip(V4, 1) }.udp(b"x").unwrap()),
        Reason::UnknownFlow => fresh(V4, |_| tcp(V4, 1, Segment::ACK)),
        Reason::NoBackend => fresh(V4, |program| {
            program.set_ring(1, &[]).unwrap();
            datagram(V4, 1)
        }),
        Reason::NoNeighbour => fresh(V4, |program| {
            program.set_hop(0, 0, 0);
            datagram(V4, 1)
        }),
        Reason::NoEgress => fresh(V4, |program| {
            let (neighbour, source) = (backend_mac(0), BACKEND_SIDE);
            let hop =
                NextHop { neighbour, port: 9, source, mtu: 1500, ifindex: 4_000_000, ..NextHop::default() };
            program.datapath.set_next_hop(MAX_PORTS, &hop);
            datagram(V4, 1)
        }),
        Reason::TooBig => fresh(V4, |_| to_vip(V4, 1).udp(&[0; 1473]).unwrap()),
        Reason::FlowTableFull => {
            let program = Program::with_flows(1, 16).unwrap();
            in_program(program, |program| {
                // Flows that the backend has answered don't give way.
                let full = (1..1_000).find(|port| {
                    let opened = program.from_client(&datagram(V4, *port)).unwrap().0 == verdict::REDIRECT;
                    opened.then(|| program.from_backend(0, &answer(V4, *port)).unwrap());
                    !opened
                });
                assert!(full.unwrap() > 16, "{full:?}");
                None
            })
        }
        // A backend that calls itself, and must not get what seems to come from it.
        Reason::ReplyCollision => fresh(V4, |_| {
            let path = Path::new((V4.backend(1), 40_000), (V4.vip(), VIP_PORT));
            path.udp(b"x").unwrap()
        }),
        Reason::OrphanReply => fresh(V4, |_| answer(V4, 1)),
        Reason::NoSourcePort => fresh(V4, |program| {
            let backend = SocketAddr::new(V4.backend(1), BACKEND_PORT);
            let one_port = Backend {
                address: to_wire(backend.ip()),
                port: backend.port().to_be_bytes(),
                abilities: ability::SERVE | ability::TAKE,
                snat_address: to_wire(V4.balancer_backend_side()),
                snat_ports: [FIRST_SNAT_PORT; 2],
                ..Backend::default()
            };
            program.datapath.set_backend(0, &one_port).unwrap();
            assert_eq!(program.from_client(&datagram(V4, 1)).unwrap().0, verdict::REDIRECT);
            datagram(V4, 2)
        }),
        Reason::NoControlConnection => fresh(V4, |program| {
            program.change_services(|service| service.options = option::MEDIA).unwrap();
            datagram(V4, 1)
        }),
        Reason::ExtensionHeaders => fresh(V6, |_| {
            let header = (60, &[0, 0, 1, 4, 0, 0, 0, 0][..]);
            packet::extended(&tcp(V6, 1, Segment::SYN), &[header; 11]).unwrap()
        }),
        Reason::NoChecksum => fresh(V6, |_| {
            let mut packet = datagram(V6, 1);
            packet[40 + 6..40 + 8].fill(0);
            packet
        }),
        // An error that a router sends about a packet that the service never sent.
        Reason::UnknownIcmp => fresh(V4, |_| {
            let quoted = to_vip(V4, 1).reversed().udp(b"x").unwrap();
            let builder = etherparse::PacketBuilder::ipv4([10, 0, 9, 9], octets(V4.vip()), 64);
            let mut packet = Vec::new();
            builder.icmpv4_raw(3, 4, [0, 0, 5, 0]).write(&mut packet, &quoted).unwrap();
            packet
        }),
        Reason::FlowRaced => on_the_host(|bed| {
            // Another CPU has begun to open another flow, whose replies would look alike.
            let request = bed::datagram();
            let key = |source: frame::Endpoint, destination: frame::Endpoint| balancer_common::FlowKey {
                source: source.0,
                destination: destination.0,
                source_port: source.1.to_be_bytes(),
                destination_port: destination.1.to_be_bytes(),
                protocol: UDP,
                family: balancer_common::family::IPV4,
                reserved: [0; 2],
            };
            let entries = [key(request.source, Bed::VIPS[1]), key(Bed::BACKENDS[0], request.source)]
                .map(|key| (key, enter::reserve(&bed.kernel, &key, 1_000)));
            let [to, back] = entries;
            assert!(to.1 != NO_TWIN && back.1 != NO_TWIN);
            for ((key, index), (_, twin), mark) in [(to, back, flags::ACTIVE), (back, to, flags::REPLY)] {
                enter::announce(&bed.kernel, index, &FlowEntry { key, twin, ..FlowEntry::zeroed() }, mark);
            }
            request
        }),
        Reason::FlowChanged => while_others_push_in(reason, |bed| {
            bed.establish(bed::CLIENT);
            // The backend alone has spoken for long, so that its entry is looked at too.
            for _ in 0..2 {
                bed.wait(1_000);
                bed.reply(&bed::to_client(0, frame::ACK), bed::VIP);
            }
            bed::to_vip(frame::ACK)
        }),
        Reason::FlowPushedOut => while_others_push_in(reason, |_| bed::datagram()),
        Reason::NoHeadroom => on_the_host(|bed| {
            bed.set_mode(forward::IPIP);
            bed.kernel.headroom.set(0);
            bed::datagram()
        }),
    }
}

/// Of a program with one backend: what `prepare` returns is the packet.
fn fresh(family: Family, prepare: impl FnOnce(&mut Program) -> Vec<u8>) -> Vec<(Reason, u64)> {
    in_program(Program::of(family, 1).unwrap(), |program| Some(prepare(program)))
}

fn in_program(
    mut program: Program,
    prepare: impl FnOnce(&mut Program) -> Option<Vec<u8>>,
) -> Vec<(Reason, u64)> {
    if let Some(packet) = prepare(&mut program) {
        assert_eq!(program.drops().unwrap(), []);
        let before = program.counters().unwrap();
        let (verdict, _) = program.from_client(&packet).unwrap();
        assert!([verdict::DROP, verdict::TX].contains(&verdict), "dropped, or answered: {verdict}");
        assert_eq!(program.counters().unwrap(), before, "no backend's");
    }
    program.drops().unwrap()
}

/// The same of the host's data plane.
fn on_the_host(prepare: impl FnOnce(&mut Bed) -> Frame) -> Vec<(Reason, u64)> {
    let mut bed = Bed::new(1);
    let frame = prepare(&mut bed);
    assert_eq!(bed.kernel.drops(), []);
    assert_eq!(bed.run(1, &frame.bytes()).0, Verdict::Drop);
    bed.kernel.drops()
}

/// The same, while another CPU gives every flow's place away before one of the looks that the packet takes into the table:
/// before the first at which that is the reason.
fn while_others_push_in(reason: Reason, prepare: impl Fn(&mut Bed) -> Frame) -> Vec<(Reason, u64)> {
    const LOOKS: u32 = 60;
    let outcome = (1..LOOKS).find_map(|look| {
        let mut bed = Bed::new(1);
        let frame = prepare(&mut bed);
        bed.kernel.interruption.set(Some((bed.kernel.looks.get() + look, |memory| memory.replace_all())));
        bed.run(1, &frame.bytes());
        let drops = bed.kernel.drops();
        drops.iter().any(|(other, _)| *other == reason).then_some(drops)
    });
    outcome.unwrap_or_default()
}

fn to_vip(family: Family, port: u16) -> Path {
    Path::new((family.client(), port), (family.vip(), VIP_PORT))
}

fn datagram(family: Family, port: u16) -> Vec<u8> {
    to_vip(family, port).udp(b"x").unwrap()
}

/// From the first backend's service port to the client.
fn answer(family: Family, port: u16) -> Vec<u8> {
    Path::new((family.backend(1), BACKEND_PORT), (family.client(), port)).udp(b"x").unwrap()
}

fn tcp(family: Family, port: u16, flags: u8) -> Vec<u8> {
    to_vip(family, port).tcp(Segment::flags(flags), &[]).unwrap()
}

fn octets(address: IpAddr) -> [u8; 4] {
    let IpAddr::V4(address) = address else { panic!("{address} is not of IPv4") };
    address.octets()
}
