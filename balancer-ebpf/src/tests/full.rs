//! A flow table without room: who must give way, and who need not.

use balancer_common::{Control, FlowEntry, FlowKey, FlowState, NO_TWIN, Reason};
use bytemuck::Zeroable;

use super::{
    bed::{Bed, VIP, to_vip},
    buffer::insert,
    frame::{ACK, Frame, SYN},
};
use crate::table;

/// A whole bucket of established flows lets no new one in, one of half-open ones does; the count stays exact.
#[test]
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
#[test]
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
#[test]
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
