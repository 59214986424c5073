//! Each cause for which a packet is refused that only another CPU brings about: counted once, under its own name.

use std::{collections::HashSet, vec::Vec};

use balancer_common::{FlowEntry, FlowKey, NO_TWIN, NextHop, Reason, UDP, family, flags};
use bytemuck::Zeroable;

use super::{
    bed::{Bed, CLIENT, VIP, datagram, to_vip},
    frame::{ACK, Endpoint, SYN},
};
use crate::{
    Verdict,
    enter::{self, Entered},
};

/// More looks into the table than a packet takes.
const LOOKS: u32 = 60;

/// What becomes of a packet when other flows take the places of all that are in the table, before each look that it
/// takes: sent on, or refused once, for one of these reasons. Which ones it were.
fn refusals(bed: impl Fn() -> Bed, frame: &[u8]) -> HashSet<Reason> {
    let mut seen = HashSet::new();
    for look in 1..LOOKS {
        let bed = bed();
        let before = bed.traffic();
        bed.kernel.interruption.set(Some((bed.kernel.looks.get() + look, |memory| memory.replace_all())));
        let (verdict, output) = bed.run(1, frame);
        let drops = bed.kernel.drops();
        if verdict == Verdict::Drop {
            assert_eq!(drops.iter().map(|(_, count)| count).sum::<u64>(), 1, "{drops:?}");
            assert_eq!((output, bed.traffic()), (frame.to_vec(), before), "{drops:?}");
            seen.insert(drops[0].0);
        } else {
            assert_eq!((verdict, drops), (Verdict::Redirect(1), Vec::new()));
        }
    }
    seen
}

/// The entry goes to another flow between the look at its key and the look at what it says.
#[test]
fn a_flow_that_changes_while_it_is_read() {
    // One direction alone has spoken for long, so that the other is looked at in between.
    let bed = || {
        let bed = Bed::new(1);
        bed.establish(CLIENT);
        for _ in 0..2 {
            bed.wait(1_000);
            bed.reply(&super::bed::to_client(0, ACK), VIP);
        }
        bed
    };
    let seen = refusals(bed, &to_vip(ACK).bytes());
    assert_eq!(seen, HashSet::from([Reason::FlowChanged, Reason::UnknownFlow]));
}

/// The flow is opened, and gone before its first packet is sent on.
#[test]
fn a_flow_that_is_pushed_out_at_once() {
    for frame in [to_vip(SYN), datagram()] {
        let seen = refusals(|| Bed::new(1), &frame.bytes());
        assert_eq!(seen, HashSet::from([Reason::FlowPushedOut]));
    }
}

/// Another CPU was opening the same flow, and was interrupted; or another flow with the same replies.
#[test]
fn a_flow_that_another_cpu_is_opening() {
    let key = |source: Endpoint, destination: Endpoint| FlowKey {
        source: source.0,
        destination: destination.0,
        source_port: source.1.to_be_bytes(),
        destination_port: destination.1.to_be_bytes(),
        protocol: UDP,
        family: family::IPV4,
        reserved: [0; 2],
    };
    for vip in Bed::VIPS {
        let bed = Bed::new(1);
        let [reply, request] = [key(Bed::BACKENDS[0], CLIENT), key(CLIENT, vip)]
            .map(|key| (key, enter::reserve(&bed.kernel, &key, 1_000)));
        assert!(reply.1 != NO_TWIN && request.1 != NO_TWIN);
        for ((key, index), (_, twin), marks) in
            [(reply, request, flags::REPLY), (request, reply, flags::ACTIVE)]
        {
            enter::announce(&bed.kernel, index, &FlowEntry { key, twin, ..FlowEntry::zeroed() }, marks);
        }
        if vip == VIP {
            // It is not waited for, and finds out when it goes on.
            bed.request(&datagram());
            assert_eq!(enter::enter(&bed.kernel, request.1), Entered::Joined);
            assert_eq!(bed.kernel.drops(), []);
        } else {
            let (verdict, output) = bed.run(1, &datagram().bytes());
            assert_eq!((verdict, output), (Verdict::Drop, datagram().bytes()));
            assert_eq!(bed.kernel.drops(), [(Reason::FlowRaced, 1)]);
            assert_eq!((bed.flows(), bed.traffic()), ((0, 0), [0; 4]));
            // It gives up: the next packet finds the table as it should be.
            enter::withdraw(&bed.kernel, request.1);
            enter::withdraw(&bed.kernel, reply.1);
        }
        bed.request(&datagram());
        assert_eq!(bed.flows(), (1, 0));
        bed.kernel.memory.assert_consistent();
        bed.kernel.assert_active_is_exact();
    }
}

/// A next hop out of a port by which nothing leaves: refused before anything is counted, as a first packet and later.
#[test]
fn a_port_that_nothing_leaves_by() {
    for is_first in [true, false] {
        let mut bed = Bed::new(1);
        if !is_first {
            bed.establish(CLIENT);
        }
        let hop: NextHop = *bed.kernel.backend_hop(0);
        *bed.kernel.backend_hop(0) = NextHop { port: 9, ..hop };
        let frame = if is_first { to_vip(SYN) } else { to_vip(ACK) };
        bed.refused(1, &frame.bytes(), Reason::NoEgress);
        *bed.kernel.backend_hop(0) = hop;
        bed.request(&frame);
    }
}
