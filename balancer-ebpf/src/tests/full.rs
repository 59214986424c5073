//! A flow table without room: who must give way, and who need not.

use balancer_common::{Control, FlowEntry, FlowKey, FlowState, NO_TWIN, Reason};
use bytemuck::Zeroable;

use super::{
    bed::{Bed, VIP, to_vip},
    buffer::insert,
    frame::{ACK, Frame, SYN},
};
use crate::table;

both! {
/// A whole bucket of established flows lets no new one in, one of half-open ones does; the count stays exact.
fn established_flows_are_not_pushed_out() {
    let bed = Bed::with_table(1, 1);
    let client = |number: u16| ([10, 0, 1, 10], 40_000 + number);
    let syn = |number| Frame::tcp(client(number), VIP, SYN);
    for number in 0..4 {
        bed.request(&syn(number));
    }
    // Full of half-open flows: each new one takes the place of another, both ways.
    for number in 4..50 {
        bed.request(&syn(number));
        assert_eq!(bed.kernel.memory.active(), 4);
        bed.kernel.assert_active_is_exact();
        bed.kernel.memory.assert_consistent();
    }
    let bed = Bed::with_table(1, 1);
    for number in 0..4 {
        bed.establish(client(number));
    }
    for number in 4..50 {
        bed.refused(1, &syn(number).bytes(), Reason::FlowTableFull);
    }
    // One minute of silence makes room, and no less.
    bed.wait((60_000_000_000_u64 >> 26) as u32);
    for number in 4..50 {
        bed.refused(1, &syn(number).bytes(), Reason::FlowTableFull);
    }
    bed.wait(1);
    bed.request(&syn(50));
    assert_eq!((bed.flows(), bed.kernel.memory.active()), ((5, 1), 4));
    bed.kernel.assert_active_is_exact();
}

/// A flow of which one direction alone speaks is in use as well.
fn a_flow_that_only_the_backend_keeps_alive_is_not_idle() {
    let bed = Bed::with_table(1, 1);
    let client = |number: u16| ([10, 0, 1, 10], 40_000 + number);
    for number in 0..4 {
        bed.establish(client(number));
    }
    bed.wait(1_000);
    for number in 0..4 {
        bed.reply(&Frame::tcp(Bed::BACKENDS[0], client(number), ACK), VIP);
    }
    for number in 4..50 {
        bed.refused(1, &Frame::tcp(client(number), VIP, SYN).bytes(), Reason::FlowTableFull);
    }
}

/// Room for one direction only: neither is kept, and nothing counts as opened and closed.
fn a_flow_without_room_for_its_replies_is_refused() {
    let bed = Bed::with_table(1, 1);
    for number in 0..7 {
        let key = FlowKey { source_port: [9, number], ..FlowKey::zeroed() };
        let control = Control::new(FlowState::Established, 0, 0);
        let entry =
            FlowEntry { key, control, twin: NO_TWIN, stamp: 1_000, timeout: 400, ..FlowEntry::zeroed() };
        let index = insert(&bed.kernel, &entry).unwrap();
        table::protect(&bed.kernel, index, true);
    }
    bed.refused(1, &to_vip(SYN).bytes(), Reason::FlowTableFull);
    assert_eq!(bed.flows(), (0, 0), "a flow that never was is neither opened nor closed");
    bed.kernel.memory.assert_consistent();
}
}

/// A flow from one of many clients.
fn log_line(number: u16) -> Frame {
    Frame::udp(([10, 0, 1, 10], 40_000 + number), VIP, b"log")
}

fn evicted(bed: &Bed) -> [u64; 3] {
    bed.kernel.evicted.each_ref().map(|count| count.get())
}

both! {
/// A datagram alone gives way to any other; a client that goes on sending does not, though nobody answers it.
fn one_way_flows_are_not_pushed_out_by_single_datagrams() {
    let bed = Bed::with_table(1, 1);
    for number in 0..50 {
        bed.request(&log_line(number));
    }
    assert_eq!((bed.flows(), evicted(&bed)), ((50, 46), [46, 0, 0]));
    let bed = Bed::with_table(1, 1);
    for number in 0..4 {
        bed.request(&log_line(number));
        bed.request(&log_line(number));
    }
    for number in 4..50 {
        bed.refused(1, &log_line(number).bytes(), Reason::FlowTableFull);
    }
    assert_eq!((bed.flows(), evicted(&bed)), ((4, 0), [0; 3]));
    // Ten seconds of silence are forgiven, and no more.
    bed.wait((10_000_000_000_u64 >> 26) as u32);
    for number in 4..50 {
        bed.refused(1, &log_line(number).bytes(), Reason::FlowTableFull);
    }
    bed.wait(1);
    bed.request(&log_line(1));
    bed.request(&log_line(50));
    assert_eq!((bed.flows(), evicted(&bed)), ((5, 1), [1, 0, 0]));
    bed.kernel.assert_active_is_exact();
}

/// Of flows that are idle, those that were never answered go first, whoever has been silent for longer.
fn idle_one_way_flows_give_way_before_established_ones() {
    let bed = Bed::with_table(1, 1);
    for number in 0..2 {
        bed.establish(([10, 0, 1, 10], 40_000 + number));
    }
    bed.wait((60_000_000_000_u64 >> 26) as u32);
    for number in 2..4 {
        bed.request(&log_line(number));
        bed.request(&log_line(number));
    }
    bed.wait((10_000_000_000_u64 >> 26) as u32 + 1);
    for number in 4..8 {
        bed.request(&log_line(number));
        bed.request(&log_line(number));
    }
    assert_eq!(evicted(&bed), [2, 2, 0]);
    for number in 8..50 {
        bed.refused(1, &log_line(number).bytes(), Reason::FlowTableFull);
    }
    for number in 4..8 {
        assert_eq!(bed.request(&log_line(number)), 0);
    }
    assert_eq!(bed.flows(), (8, 4));
}
}
