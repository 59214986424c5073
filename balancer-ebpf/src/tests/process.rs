//! The whole way of a packet: who gets it, with which bytes, and what is counted.

use std::vec;

use balancer_common::{MAX_PORTS, NextHop, Reason, Traffic};

use super::{
    bed::{Bed, CLIENT, FIN_ACK, SYN_ACK, UNIT, VIP, answer, datagram, to_client, to_vip},
    frame::{ACK, FIN, Frame, L4, PSH, RST, SYN, ip_header, translated},
};
use crate::Verdict;

both! {
fn a_connection_is_carried_from_its_syn_to_its_last_fin() {
    for (first_end, second_end) in [(true, false), (false, true)] {
        let bed = Bed::new(2);
        bed.set_ring(&[1, 0]);
        assert_eq!(bed.request(&to_vip(SYN)), 1);
        assert_eq!(bed.request(&to_vip(SYN)), 1, "a retransmission");
        bed.reply(&to_client(1, SYN_ACK), VIP);
        assert_eq!(bed.request(&Frame { payload: vec![b'x'; 700], ..to_vip(ACK | PSH) }), 1);
        bed.reply(&Frame { payload: vec![b'y'; 1440], ..to_client(1, ACK | PSH) }, VIP);
        assert_eq!(bed.flows(), (1, 0));
        for is_client in [first_end, second_end] {
            assert_eq!(bed.flows(), (1, 0), "one FIN is no end");
            if is_client {
                assert_eq!(bed.request(&to_vip(FIN_ACK)), 1)
            } else {
                bed.reply(&to_client(1, FIN_ACK), VIP)
            };
        }
        assert_eq!(bed.flows(), (1, 1));
        assert_eq!(bed.request(&to_vip(ACK)), 1, "the last acknowledgements still arrive");
        bed.reply(&to_client(1, ACK), VIP);
        assert_eq!(bed.request(&to_vip(RST)), 1);
        assert_eq!(bed.flows(), (1, 1), "closed once");
        let header = ip_header() as u64 + 20;
        let counters = bed.kernel.counted(1);
        assert_eq!(counters.request, Traffic { packets: 6, bytes: 6 * header + 700 });
        assert_eq!(counters.reply, Traffic { packets: 4, bytes: 4 * header + 1440 });
        assert_eq!((bed.kernel.counted(0), bed.kernel.dropped()), (Default::default(), 0));
        assert_eq!(bed.kernel.taken(0), 1);
        bed.kernel.assert_active_is_exact();
    }
}

fn a_udp_conversation_keeps_its_backend() {
    let bed = Bed::new(3);
    let other = Frame::udp((CLIENT.0, 40_001), VIP, b"");
    assert_eq!([bed.request(&datagram()), bed.request(&other)], [0, 1]);
    bed.reply(&answer(0), VIP);
    assert_eq!([bed.request(&datagram()), bed.request(&other)], [0, 1]);
    bed.reply(&Frame { l4: L4::Udp { is_summed: ip_header() == 40 }, ..answer(0) }, VIP);
    assert_eq!((bed.flows(), bed.kernel.taken(1)), ((2, 0), 2));
    // TCP and UDP between the same endpoints are two flows.
    assert_eq!(bed.request(&to_vip(SYN)), 0);
    bed.kernel.assert_active_is_exact();
}

fn a_reply_that_would_be_ambiguous_goes_to_another_backend() {
    let bed = Bed::new(2);
    bed.set_ring(&[0]);
    let second = |flags| Frame::tcp(CLIENT, Bed::VIPS[1], flags);
    bed.establish(CLIENT);
    bed.refused(1, &second(SYN).bytes(), Reason::ReplyCollision);
    bed.set_ring(&[0, 1]);
    assert_eq!(bed.request(&second(SYN)), 1);
    assert_eq!(bed.kernel.taken(0), 2);
    bed.reply(&to_client(1, SYN_ACK), Bed::VIPS[1]);
    bed.reply(&to_client(0, ACK), VIP);
}

fn a_flow_that_is_over_blocks_nobody() {
    let second = Frame::tcp(CLIENT, Bed::VIPS[1], SYN);
    for is_closed in [true, false] {
        let bed = Bed::new(1);
        bed.establish(CLIENT);
        if is_closed {
            bed.request(&to_vip(RST));
        } else {
            bed.wait(u32::from(Bed::TCP_SERVICE.idle_timeout) * UNIT + 1);
        }
        assert_eq!(bed.request(&second), 0);
        assert_eq!((bed.flows(), bed.kernel.memory.live().count()), ((2, 1), 2));
        bed.reply(&to_client(0, SYN_ACK), Bed::VIPS[1]);
        bed.kernel.assert_active_is_exact();
    }
}

/// A backend that calls the service gets another backend, or is refused; a packet to itself never leaves.
fn no_packet_leaves_with_its_source_as_destination() {
    let caller = (Bed::BACKENDS[0].0, 40_000);
    let bed = Bed::new(2);
    assert_eq!(bed.request(&Frame::tcp(caller, VIP, SYN)), 1);
    let bed = Bed::new(1);
    bed.refused(2, &Frame::tcp(caller, VIP, SYN).bytes(), Reason::ReplyCollision);
    bed.refused(2, &Frame::udp(caller, VIP, b"").bytes(), Reason::ReplyCollision);
    assert_eq!(bed.request(&Frame::tcp(CLIENT, VIP, SYN)), 0);
    // A packet that claims to come from the service itself would have the backend's answer sent as such a one.
    for frame in [Frame::tcp(VIP, VIP, SYN), Frame::udp(VIP, VIP, b"")] {
        bed.refused(1, &frame.bytes(), Reason::Malformed);
    }
}

/// Every reason that refuses a packet of a flow that exists: the flow stays as it was.
fn a_refused_packet_leaves_its_flow_alone() {
    let mut bed = Bed::new(1);
    bed.establish(CLIENT);
    bed.wait(5);
    for (ingress, frame) in [(1, to_vip(ACK)), (2, to_client(0, ACK))] {
        for ttl in [0, 1] {
            bed.refused(ingress, &Frame { ttl, ..frame.clone() }.bytes(), Reason::TtlExceeded);
        }
        for flags in [0, FIN, SYN | FIN | ACK, SYN | RST, FIN | RST | ACK] {
            let l4 = L4::Tcp { flags, options: vec![] };
            bed.refused(ingress, &Frame { l4, ..frame.clone() }.bytes(), Reason::Malformed);
        }
        let large = Frame { payload: vec![0; usize::from(Bed::MTU) - ip_header() - 19], ..frame.clone() };
        bed.refused(ingress, &large.bytes(), Reason::TooBig);
        let hop = if ingress == 1 { MAX_PORTS } else { 0 };
        let usable = bed.kernel.hops[&hop];
        for (unusable, reason) in [
            (Reason::NoNeighbour as u16, Reason::NoNeighbour),
            (Reason::NoEgress as u16, Reason::NoEgress),
            (999, Reason::NoEgress),
        ] {
            bed.kernel.set_hop(hop, NextHop { mtu: 0, unusable, ..usable });
            bed.refused(ingress, &frame.bytes(), reason);
        }
        bed.kernel.hops.remove(&hop);
        bed.refused(ingress, &frame.bytes(), Reason::NoEgress);
        bed.kernel.set_hop(hop, usable);
    }
    let largest = Frame { payload: vec![0; usize::from(Bed::MTU) - ip_header() - 20], ..to_vip(ACK) };
    assert_eq!(bed.request(&largest), 0);
    bed.reply(&Frame { ttl: 2, ..to_client(0, ACK) }, VIP);
}

/// Every reason that refuses the first packet of a flow: nothing is opened.
fn a_refused_first_packet_opens_no_flow() {
    for frame in [to_vip(SYN), datagram()] {
        let mut bed = Bed::new(1);
        let input = frame.bytes();
        bed.refused(1, &Frame { ttl: 1, ..frame.clone() }.bytes(), Reason::TtlExceeded);
        bed.refused(1, &Frame { payload: vec![0; 1500], ..frame.clone() }.bytes(), Reason::TooBig);
        bed.refused(9, &input, Reason::NoEgress);
        let hop = bed.kernel.hops[&MAX_PORTS];
        *bed.kernel.backend_hop(0) = NextHop { mtu: 0, unusable: Reason::NoNeighbour as u16, ..hop };
        bed.refused(1, &input, Reason::NoNeighbour);
        *bed.kernel.backend_hop(0) = hop;
        bed.set_ring(&[]);
        bed.refused(1, &input, Reason::NoBackend);
        bed.set_ring(&[7]);
        bed.refused(1, &input, Reason::NoBackend);
        assert_eq!(bed.flows(), (0, 0));
    }
    let bed = Bed::new(1);
    for flags in [ACK, SYN_ACK, FIN_ACK, RST, RST | ACK] {
        bed.refused(1, &to_vip(flags).bytes(), Reason::UnknownFlow);
    }
    assert_eq!(bed.kernel.taken(0), 0);
}

fn what_no_service_is_meant_by_passes() {
    let bed = Bed::new(1);
    let elsewhere = [(VIP.0, 81), ([192, 0, 2, 11], 80), Bed::BACKENDS[0]];
    for destination in elsewhere {
        // Nobody but the host itself judges what is not ours.
        for flags in [SYN, ACK, 0, SYN | FIN] {
            bed.passed(1, &Frame::tcp(CLIENT, destination, flags).bytes());
        }
        bed.passed(1, &Frame { ttl: 1, ..Frame::udp(CLIENT, destination, b"x") }.bytes());
    }
    bed.passed(2, &to_client(0, SYN_ACK).bytes());
    assert_eq!(bed.kernel.memory.live().count(), 0);
}

fn replies_follow_the_client() {
    let bed = Bed::new(1);
    bed.establish(CLIENT);
    let moved = [2, 0, 0, 0, 0, 99];
    let replied = |bed: &Bed| {
        let input = to_client(0, ACK).bytes();
        let (verdict, output) = bed.run(2, &input);
        (verdict, output[..6].to_vec(), output[6..12].to_vec())
    };
    // Another neighbour, another interface, both, and back.
    for (ingress, from) in [(1, moved), (3, moved), (1, Bed::CLIENT_MAC), (3, moved), (3, Bed::CLIENT_MAC)] {
        let request = Frame { from, ..to_vip(ACK) };
        let (verdict, output) = bed.run(ingress, &request.bytes());
        assert_eq!((verdict, &output[..6]), (Verdict::Redirect(1), &Bed::BACKEND_MACS[0][..]));
        let (port, side) = if ingress == 1 { (0, Bed::CLIENT_SIDE) } else { (2, Bed::THIRD_SIDE) };
        assert_eq!(replied(&bed), (Verdict::Redirect(port), from.to_vec(), side.to_vec()));
    }
    // A refused packet moves nobody.
    bed.refused(1, &Frame { from: moved, ttl: 1, ..to_vip(ACK) }.bytes(), Reason::TtlExceeded);
    assert_eq!(replied(&bed).1, Bed::CLIENT_MAC);
}

/// With one interface for both sides, frames go back out of where they came in.
fn one_armed_traffic_is_transmitted() {
    let bed = Bed::new(1);
    let (verdict, output) = bed.run(2, &to_vip(SYN).bytes());
    assert_eq!((verdict, &output[..6]), (Verdict::Transmit, &Bed::BACKEND_MACS[0][..]));
    let (verdict, output) = bed.run(2, &to_client(0, SYN_ACK).bytes());
    let expected =
        translated(&to_client(0, SYN_ACK).bytes(), Bed::CLIENT_MAC, Bed::BACKEND_SIDE, VIP, CLIENT);
    assert_eq!((verdict, output), (Verdict::Transmit, expected));
}

/// A flow goes on when its service has gone: only new flows need it.
fn a_flow_outlives_its_service() {
    let mut bed = Bed::new(1);
    bed.establish(CLIENT);
    bed.kernel.services.clear();
    assert_eq!(bed.request(&to_vip(ACK)), 0);
    bed.reply(&to_client(0, FIN_ACK), VIP);
    assert_eq!(bed.request(&to_vip(FIN_ACK)), 0);
    assert_eq!(bed.flows(), (1, 1));
    bed.passed(1, &to_vip(SYN).bytes());
    bed.passed(1, &Frame::tcp((CLIENT.0, 1), VIP, SYN).bytes());
}

/// Packets of both directions count by the age of their flow, as long as that is within what is asked for.
fn packets_count_by_the_age_of_their_flow() {
    for start in [1_000, u32::MAX - 5] {
        let mut bed = Bed::new(1);
        bed.kernel.profiled_age = 9;
        bed.kernel.now.set(start);
        bed.request(&datagram());
        bed.wait(u32::MAX);
        bed.reply(&answer(0), VIP);
        bed.wait(1 + 3);
        bed.request(&datagram());
        bed.refused(1, &Frame { ttl: 1, ..datagram() }.bytes(), Reason::TtlExceeded);
        bed.wait(6);
        bed.reply(&answer(0), VIP);
        bed.wait(1);
        bed.request(&datagram());
        let [asked, answered] = [3, 6].map(|payload| Traffic { packets: 1, bytes: ip_header() as u64 + 8 + payload });
        let both = Traffic { packets: 2, bytes: asked.bytes + answered.bytes };
        let profile = bed.kernel.profiled(1);
        // An answer whose CPU read the clock a little before is as young as can be.
        assert_eq!((profile.ages[0], profile.ages[3], profile.ages[8]), (both, asked, answered));
        assert_eq!(profile.ages.iter().map(|traffic| traffic.packets).sum::<u64>(), 4);
        assert!(bed.kernel.profiled(0).ages.iter().all(|traffic| traffic.packets == 0));
        // Once past it, a flow is not looked at again, also not when its age comes round.
        for _ in 0..0x80 {
            bed.wait(0x200);
            bed.request(&datagram());
        }
        bed.reply(&answer(0), VIP);
        assert_eq!(bed.kernel.profiled(1), profile);
        bed.request(&to_vip(SYN));
        assert_eq!(bed.kernel.profiled(0).ages[0], Traffic { packets: 1, bytes: ip_header() as u64 + 20 });
    }
}
}
