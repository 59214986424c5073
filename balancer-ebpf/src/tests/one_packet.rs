//! Services that keep no flows.

use std::{vec, vec::Vec};

use balancer_common::{
    FIRST_SNAT_PORT, ICMP, ICMPV6, MAX_PORTS, NextHop, Reason, Service, UDP, answer as answers, endpoint,
    family, option, role, selector,
};

use super::{
    bed::{Bed, CLIENT, VIP, datagram},
    frame::{ACK, Endpoint, FAMILY, Frame, L4, SYN, address, ip_header, translated},
};
use crate::{Verdict, Way};

/// The service that keeps no flows.
fn service(bed: &mut Bed) -> &mut Service {
    let key = bed.kernel.key(VIP, UDP);
    bed.kernel.services.get_mut(&key).unwrap()
}

/// A balancer whose UDP service at the first address keeps no flows.
fn bed(backends: usize) -> Bed {
    let mut bed = Bed::new(backends);
    service(&mut bed).options = option::ONE_PACKET;
    for (id, from) in Bed::BACKENDS.into_iter().take(backends).enumerate() {
        let from = bed.kernel.key(from, UDP);
        bed.kernel.endpoints.insert(from, endpoint::ONE_PACKET | id as u32);
        let backend = &mut bed.kernel.backends[id];
        (backend.service, backend.service_address, backend.service_port) =
            (1, address(VIP.0), VIP.1.to_be_bytes());
    }
    bed.kernel.ways.insert(address(CLIENT.0), Ok(Way { ifindex: 1, neighbour: Bed::CLIENT_MAC }));
    bed
}

fn from(backend: usize, to: Endpoint, payload: &[u8]) -> Frame {
    Frame::udp(Bed::BACKENDS[backend], to, payload)
}

both! {
    /// One client, one port: every datagram takes the next slot, its answer carries the service's address whoever answers,
    /// packets and bytes count for both, and there is no flow.
    fn every_datagram_is_scheduled_by_itself() {
        let bed = bed(3);
        let picks = Vec::from_iter((0..9).map(|_| bed.request(&datagram())));
        assert_eq!(picks, [0, 1, 2].repeat(3));
        for backend in 0..3 {
            for _ in 0..2 {
                bed.reply(&from(backend, CLIENT, b"an answer"), VIP);
            }
            let counted = bed.kernel.counted(backend);
            assert_eq!((counted.request.packets, counted.request.bytes), (3, 3 * (ip_header() as u64 + 11)));
            assert_eq!((counted.reply.packets, counted.reply.bytes), (2, 2 * (ip_header() as u64 + 17)));
            assert_eq!((counted.opened, counted.closed), (3, 3), "flows of one packet");
        }
        assert_eq!(bed.kernel.memory.live().count(), 0);
        let young = bed.kernel.profiled(1).ages[0];
        assert_eq!((young.packets, young.bytes), (9 + 6, 9 * (ip_header() as u64 + 11) + 6 * (ip_header() as u64 + 17)));
        assert_eq!(bed.kernel.dropped(), 0);
    }
}

both! {
    /// The sums are right whatever they are, and none stays none.
    fn sums_are_kept_right() {
        let bed = bed(1);
        for number in 0..2_000_u16 {
            let payload = number.wrapping_mul(31_337).to_be_bytes();
            bed.request(&Frame::udp((CLIENT.0, 1_000 + number), VIP, &payload));
            bed.reply(&from(0, (CLIENT.0, 1_000 + number), &payload), VIP);
        }
        let unsummed = Frame { l4: L4::Udp { is_summed: false }, ..datagram() };
        if FAMILY.get() == family::IPV4 {
            assert_eq!(bed.request(&unsummed), 0);
        } else {
            bed.refused(1, &unsummed.bytes(), Reason::NoChecksum);
        }
    }
}

both! {
    fn hashes_choose_as_for_flows() {
        let mut bed = bed(3);
        service(&mut bed).selector = selector::SOURCE;
        let first = bed.request(&datagram());
        for port in 1_000..1_050 {
            assert_eq!(bed.request(&Frame::udp((CLIENT.0, port), VIP, b"x")), first);
        }
        service(&mut bed).selector = selector::FLOW;
        let reached = |bed: &Bed| {
            Vec::from_iter((1_000..1_050).map(|port| bed.request(&Frame::udp((CLIENT.0, port), VIP, b"x"))))
        };
        let once = reached(&bed);
        assert_eq!(once, reached(&bed));
        assert!((0..3).all(|backend| once.contains(&backend)), "{once:?}");
    }
}

both! {
    /// Where an answer goes is the kernel's to say: what it says is done, and what it does not know is refused by name.
    fn answers_go_the_kernels_way() {
        let mut bed = bed(1);
        let router = [2, 0, 0, 0, 0, 77];
        bed.kernel.ways.insert(address(CLIENT.0), Ok(Way { ifindex: 3, neighbour: router }));
        let input = from(0, CLIENT, b"answer").bytes();
        let (verdict, output) = bed.run(2, &input);
        assert_eq!(verdict, Verdict::Redirect(2));
        assert_eq!(output, translated(&input, router, Bed::THIRD_SIDE, VIP, CLIENT));
        // Back out of where it came in.
        bed.kernel.ways.insert(address(CLIENT.0), Ok(Way { ifindex: 2, neighbour: router }));
        assert_eq!(bed.run(2, &input).0, Verdict::Transmit);
        for (way, reason) in [
            (Err(Reason::NoNeighbour), Reason::NoNeighbour),
            (Err(Reason::NoEgress), Reason::NoEgress),
            (Ok(Way { ifindex: 9, neighbour: router }), Reason::NoEgress),
        ] {
            bed.kernel.ways.insert(address(CLIENT.0), way);
            bed.refused(2, &input, reason);
        }
        bed.kernel.ways.insert(address(CLIENT.0), Ok(Way { ifindex: 1, neighbour: Bed::CLIENT_MAC }));
        let hop: NextHop = bed.kernel.hops[&0];
        let unusable = [
            (NextHop { mtu: 30, ..hop }, Reason::TooBig),
            (NextHop { port: 9, ifindex: 8, ..hop }, Reason::NoEgress),
        ];
        for (unusable, reason) in unusable {
            bed.kernel.set_hop(0, unusable);
            bed.refused(2, &input, reason);
        }
        bed.kernel.set_hop(0, hop);
        bed.reply(&from(0, CLIENT, b"answer"), VIP);
    }
}

both! {
    /// What is refused of a flow's first packet is refused here, and nothing is counted.
    fn what_cannot_be_sent_on_is_refused_by_name() {
        let mut bed = bed(1);
        let input = datagram().bytes();
        bed.refused(1, &Frame { ttl: 1, ..datagram() }.bytes(), Reason::TtlExceeded);
        bed.refused(2, &Frame { ttl: 1, ..from(0, CLIENT, b"x") }.bytes(), Reason::TtlExceeded);
        bed.refused(1, &Frame { payload: [0; 1500].to_vec(), ..datagram() }.bytes(), Reason::TooBig);
        for frame in [datagram(), from(0, CLIENT, b"x")] {
            let ingress = if frame.source == CLIENT { 1 } else { 2 };
            // The first fragment of more.
            let extensions = vec![(44, vec![0, 0, 1, 0, 0, 0, 7])];
            let mut fragment = Frame { extensions, ..frame.clone() }.bytes();
            if FAMILY.get() == family::IPV4 {
                fragment = frame.bytes();
                fragment[20] = 0x20;
            }
            bed.refused(ingress, &fragment, Reason::Fragment);
        }
        let nobody: &[[u8; 4]] = match FAMILY.get() {
            family::IPV4 => &[[0; 4], [127, 0, 0, 1], [224, 0, 0, 1], [255; 4], VIP.0],
            _ => &[VIP.0],
        };
        for source in nobody {
            bed.refused(1, &Frame::udp((*source, 7), VIP, b"x").bytes(), Reason::Malformed);
        }
        // The only backend asks itself.
        bed.refused(2, &Frame::udp((Bed::BACKENDS[0].0, 7), VIP, b"x").bytes(), Reason::ReplyCollision);
        let hop = bed.kernel.hops[&MAX_PORTS];
        *bed.kernel.backend_hop(0) = NextHop { mtu: 0, unusable: Reason::NoNeighbour as u16, ..hop };
        bed.refused(1, &input, Reason::NoNeighbour);
        *bed.kernel.backend_hop(0) = hop;
        bed.set_ring(&[]);
        bed.refused(1, &input, Reason::NoBackend);
        service(&mut bed).answers = answers::NO_BACKEND;
        bed.kernel.sends_icmp.set(true);
        let (verdict, output) = bed.run(1, &input);
        let told = if FAMILY.get() == family::IPV4 { output[23] == ICMP } else { output[20] == ICMPV6 };
        assert!(verdict == Verdict::Transmit && told, "{output:02x?}");
        bed.set_ring(&[0]);
        assert_eq!(bed.request(&datagram()), 0);
    }
}

both! {
    /// Nobody gets anything sent in the service's name but its backends, from where they are, to who can be a client.
    fn only_a_backend_answers() {
        let mut bed = bed(2);
        let local = [10, 0, 2, 1];
        bed.kernel.roles.insert(address(local), role::LOCAL);
        let given = [10, 0, 2, 2];
        bed.kernel.roles.insert(address(given), role::LOCAL | role::with_ports_from(FIRST_SNAT_PORT));
        for to in [local, given, VIP.0] {
            bed.kernel.ways.insert(address(to), Ok(Way { ifindex: 1, neighbour: [8; 6] }));
        }
        // From the clients' side: whoever it is, no backend.
        bed.refused(1, &from(0, CLIENT, b"forged").bytes(), Reason::OrphanReply);
        bed.refused(3, &from(0, CLIENT, b"forged").bytes(), Reason::OrphanReply);
        // To the service's address, where nothing is served; to ports of this host that clients are given.
        bed.refused(2, &from(0, (VIP.0, 9), b"x").bytes(), Reason::OrphanReply);
        bed.refused(2, &from(0, (given, 61_000), b"x").bytes(), Reason::OrphanReply);
        // Answers to the host's own questions are the host's.
        bed.passed(2, &from(0, (local, 61_000), b"x").bytes());
        bed.passed(2, &from(0, (given, 60_999), b"x").bytes());
        // Another port of the backend, and its TCP: not the service's business.
        bed.passed(2, &Frame::udp((Bed::BACKENDS[0].0, 9), CLIENT, b"x").bytes());
        bed.passed(2, &Frame::tcp(Bed::BACKENDS[0], CLIENT, ACK).bytes());
        // A backend that asks the service from its own endpoint asks, and does not answer.
        let asked = Frame::udp(Bed::BACKENDS[1], VIP, b"x");
        let (verdict, output) = bed.run(2, &asked.bytes());
        assert_eq!((verdict, &output[..6]), (Verdict::Transmit, &Bed::BACKEND_MACS[0][..]));
        // A backend whose service is not written yet.
        bed.kernel.backends[0].service_port = [0; 2];
        bed.refused(2, &from(0, CLIENT, b"x").bytes(), Reason::OrphanReply);
    }
}

both! {
    /// A flow from before the service was so configured goes on until it is taken out; other services are as they were.
    fn flows_beside_it_go_on() {
        let mut bed = bed(2);
        service(&mut bed).options = 0;
        let backend = bed.request(&datagram());
        service(&mut bed).options = option::ONE_PACKET;
        for _ in 0..4 {
            assert_eq!(bed.request(&datagram()), backend);
            bed.reply(&from(backend, CLIENT, b"x"), VIP);
        }
        bed.wait(u32::from(Bed::UDP_SERVICE.idle_timeout) * 4 + 1);
        let picks = [(); 4].map(|()| bed.request(&datagram()));
        assert_eq!(picks, [1, 0, 1, 0]);
        assert_eq!(bed.request(&Frame::tcp(CLIENT, VIP, SYN)), 0);
        assert_eq!(bed.kernel.memory.active(), 1 + 1, "the old flow, and a connection");
    }
}
