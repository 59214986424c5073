//! From one VLAN into another: frames leave with the tags of the way that they take.

use std::{vec, vec::Vec};

use balancer_common::{MAX_PORTS, NextHop, Reason, forward, vlan};

use super::{
    bed::{Bed, SYN_ACK, VIP, answer, datagram, to_client, to_vip},
    frame::{ACK, Frame, SYN, translated},
};
use crate::Verdict;

const TAG: [u8; 4] = [0x81, 0x00, 0x00, 0x0a];
const OTHER: [u8; 4] = [0x81, 0x00, 0x00, 0x14];
const SERVICE: [u8; 4] = [0x88, 0xa8, 0x00, 0x05];
const PRIORITY: [u8; 4] = [0x81, 0x00, 0x60, 0x00];

const SERVICE_TAG: u32 = vlan::SERVICE | 5;
/// Stacks of tags, and their numbers.
fn stacks() -> [(Vec<[u8; 4]>, u32); 4] {
    [
        (vec![], vlan::NONE),
        (vec![TAG], 10),
        (vec![OTHER], 20),
        (vec![SERVICE, TAG], SERVICE_TAG << vlan::BITS | 10),
    ]
}

/// A balancer with devices for these tags on the clients' interface (port 64) and on the backends' (port 65).
fn between(clients: u32, backends: u32) -> Bed {
    let mut bed = Bed::new(2);
    for (port, ifindex, place, tags) in [(64, 1, 0, clients), (65, 2, 1, backends)] {
        if tags != vlan::NONE {
            bed.kernel.ports.insert((ifindex, tags), port);
            let hop: NextHop = bed.kernel.hops[&place];
            bed.kernel.set_hop(u32::from(port), NextHop { vlan: tags, ..hop });
        }
    }
    for id in 0..2 {
        bed.kernel.backend_hop(id).vlan = backends;
    }
    bed
}

/// A frame with other tags in place of its own.
fn with_tags(frame: &[u8], count: usize, tags: &[[u8; 4]]) -> Vec<u8> {
    [&frame[..12], &tags.concat(), &frame[12 + 4 * count..]].concat()
}

/// Sends a frame to a service with the first tags; it must reach its backend with the second.
#[track_caller]
fn request(bed: &Bed, frame: Frame, tags: &[[u8; 4]], expected: &[[u8; 4]]) {
    let input = Frame { tags: tags.to_vec(), ..frame.clone() }.bytes();
    let (verdict, output) = bed.run(1, &input);
    assert_eq!(verdict, Verdict::Redirect(1), "{:?}", bed.kernel.drops());
    let to = Bed::BACKEND_MACS[0];
    let whole = translated(&input, to, Bed::BACKEND_SIDE, frame.source, Bed::BACKENDS[0]);
    assert_eq!(output, with_tags(&whole, tags.len(), expected));
}

#[track_caller]
fn reply(bed: &Bed, frame: Frame, tags: &[[u8; 4]], expected: &[[u8; 4]]) {
    let input = Frame { tags: tags.to_vec(), ..frame.clone() }.bytes();
    let (verdict, output) = bed.run(2, &input);
    assert_eq!(verdict, Verdict::Redirect(0), "{:?}", bed.kernel.drops());
    let whole = translated(&input, Bed::CLIENT_MAC, Bed::CLIENT_SIDE, VIP, frame.destination);
    assert_eq!(output, with_tags(&whole, tags.len(), expected));
}

both! {
/// From and to each: the tags are put on, taken off, or exchanged, and both ends see their own.
fn a_frame_leaves_with_the_tags_of_its_way() {
    for (near, clients) in stacks() {
        for (far, backends) in stacks() {
            let bed = between(clients, backends);
            bed.set_ring(&[0]);
            request(&bed, to_vip(SYN), &near, &far);
            reply(&bed, to_client(0, SYN_ACK), &far, &near);
            request(&bed, Frame { payload: vec![7; 600], ..to_vip(ACK) }, &near, &far);
            request(&bed, datagram(), &near, &far);
            reply(&bed, answer(0), &far, &near);
            // Bytes are those of IP.
            let [_, requests, _, replies] = bed.traffic();
            let length = |frame: Frame| frame.bytes().len() as u64 - 14;
            let data = Frame { payload: vec![7; 600], ..to_vip(ACK) };
            assert_eq!(requests, length(to_vip(SYN)) + length(data) + length(datagram()));
            assert_eq!(replies, length(to_client(0, SYN_ACK)) + length(answer(0)));
            bed.kernel.assert_active_is_exact();
        }
    }
}

fn a_priority_is_kept_where_a_tag_stays_one() {
    let bed = between(10, 20);
    bed.set_ring(&[0]);
    request(&bed, datagram(), &[[0x81, 0x00, 0xb0, 0x0a]], &[[0x81, 0x00, 0xb0, 0x14]]);
    let bed = between(vlan::NONE, 20);
    bed.set_ring(&[0]);
    request(&bed, datagram(), &[PRIORITY], &[[0x81, 0x00, 0x60, 0x14]]);
    // A tag without a VLAN is no other way.
    let bed = between(vlan::NONE, vlan::NONE);
    bed.set_ring(&[0]);
    request(&bed, datagram(), &[PRIORITY], &[PRIORITY]);
    let service_priority = [0x88, 0xa8, 0x60, 0x00];
    request(&bed, to_vip(SYN), &[service_priority], &[service_priority]);
}

/// The way back is where the last request came from.
fn a_client_that_moves_to_another_vlan_is_answered_there() {
    let mut bed = between(10, 20);
    bed.kernel.ports.insert((1, 30), 66);
    let hop: NextHop = bed.kernel.hops[&64];
    bed.kernel.set_hop(66, NextHop { vlan: 30, ..hop });
    bed.set_ring(&[0]);
    let third = [0x81, 0x00, 0x00, 0x1e];
    for tags in [TAG, third, TAG] {
        request(&bed, datagram(), &[tags], &[OTHER]);
        reply(&bed, answer(0), &[OTHER], &[tags]);
    }
    request(&bed, datagram(), &[], &[OTHER]);
    reply(&bed, answer(0), &[OTHER], &[]);
}

/// In a VLAN that this host has no device of, it is a switch: tags stay, and lead into no other.
fn an_unknown_vlan_is_not_routed() {
    let bed = between(vlan::NONE, vlan::NONE);
    bed.set_ring(&[0]);
    request(&bed, datagram(), &[TAG], &[TAG]);
    reply(&bed, answer(0), &[TAG], &[TAG]);
    let bed = between(10, 20);
    bed.refused(1, &Frame { tags: vec![SERVICE, TAG], ..datagram() }.bytes(), Reason::NoEgress);
    bed.refused(1, &Frame { tags: vec![OTHER], ..to_vip(SYN) }.bytes(), Reason::NoEgress);
}

fn a_tunnel_leaves_with_the_tags_of_its_way() {
    for (near, clients) in stacks() {
        for (far, backends) in stacks() {
            let mut bed = between(clients, backends);
            bed.set_ring(&[0]);
            bed.set_mode(forward::GUE);
            bed.kernel.backends[0].snat_address = bed.kernel.backends[1].address;
            bed.kernel.backends[0].snat_prefix = 128;
            let (verdict, output) = bed.run(1, &Frame { tags: near.clone(), ..datagram() }.bytes());
            assert_eq!(verdict, Verdict::Redirect(1), "{:?}", bed.kernel.drops());
            assert_eq!(output[12..12 + 4 * far.len()], far.concat());
            let inner = datagram().bytes();
            assert_eq!(output[output.len() - 10..], inner[inner.len() - 10..]);
            let outer = &output[14 + 4 * far.len()..];
            let header = if outer[0] >> 4 == 4 { 20 } else { 40 };
            assert_eq!(outer.len(), header + 8 + inner.len() - 14);
        }
    }
    assert_eq!(Bed::new(1).kernel.hops[&MAX_PORTS].vlan, vlan::NONE);
}
}
