//! VLANs: a frame leaves with the tags of the way that it takes. Where this host has no device of the VLAN that a frame came
//! in, it is a switch to it, and the tags stay.

use balancer_common::{NextHop, Reason, vlan};

use crate::{
    Environment, Packet,
    packet::{read, write},
    parse::{ETHER_TYPE, Link, TAG, TAGGED, link},
    process::{self, Step},
};

/// The way back to whoever is behind these tags, as they came in.
#[inline(always)]
pub fn port<E: Environment>(environment: &E, tags: u32) -> Option<u16> {
    let ifindex = environment.ingress();
    match environment.port(ifindex, vlan::normal(tags)) {
        Some(port) => Some(port),
        None => environment.port(ifindex, vlan::NONE),
    }
}

/// Whether a frame with these tags may leave by this hop. Where this host has no device of its VLAN, it is routed into no other.
#[inline(always)]
pub fn may_leave<E: Environment>(environment: &E, tags: u32, hop: &NextHop) -> bool {
    hop.vlan == vlan::NONE || environment.knows_vlan(tags)
}

/// Whether this host has a device for frames with these tags where this one came in.
#[inline(always)]
pub fn is_known<E: Environment>(environment: &E, tags: u32) -> bool {
    let tags = vlan::normal(tags);
    tags == vlan::NONE || environment.port(environment.ingress(), tags).is_some()
}

/// What a flow notes of where its requests come in: half of the interface's index, in each VLAN another.
#[inline(always)]
pub const fn mark(ifindex: u32, tags: u32) -> u16 {
    // An odd number, so that no two VLANs next to each other look like two interfaces next to each other.
    ifindex as u16 ^ (tags.wrapping_mul(0x9e37_79b1) >> 16) as u16
}

/// Gives a frame that may go this way and is ready for it, by the hop with this index, the tags that it needs.
#[inline(always)]
pub fn leave<P: Packet, E: Environment>(packet: &P, environment: &E, index: u32) -> Step {
    let Some(hop) = environment.next_hop(index) else { return Step::Refused(Reason::NoEgress) };
    let Some(Link { l3, vlan: tags, .. }) = link(packet) else { return Step::Refused(Reason::Malformed) };
    let is_routed = hop.vlan != vlan::NONE || environment.knows_vlan(tags);
    if hop.vlan != vlan::normal(tags) && is_routed && put_tags(packet, l3, hop).is_none() {
        return Step::Refused(Reason::NoHeadroom);
    }
    process::leave(environment, hop)
}

/// Takes the tags off in front of `l3`, and puts those of the hop there. The priority of the outer one stays. `None` where there
/// is no room for them.
#[inline(always)]
fn put_tags<P: Packet>(packet: &P, l3: usize, hop: &NextHop) -> Option<()> {
    let macs: [u8; ETHER_TYPE] = read(packet, 0)?;
    let tags_end = l3 - 2;
    let [priority] = if tags_end > ETHER_TYPE { read(packet, ETHER_TYPE + 2)? } else { [0; 1] };
    let [outer, inner] = [hop.vlan >> vlan::BITS, hop.vlan & vlan::TAG];
    let room = TAG * (usize::from(outer != 0) + usize::from(inner != 0));
    if !packet.shift(tags_end as i32 - (ETHER_TYPE + room) as i32) {
        return None;
    }
    write(packet, 0, macs)?;
    if outer != 0 {
        write(packet, ETHER_TYPE, tag(outer, priority))?;
        return write(packet, ETHER_TYPE + TAG, tag(inner, priority));
    }
    if inner != 0 { write(packet, ETHER_TYPE, tag(inner, priority)) } else { Some(()) }
}

/// A tag, as it lies in the frame.
#[inline(always)]
const fn tag(tag: u32, priority: u8) -> [u8; TAG] {
    let [t0, t1] = TAGGED[(tag & vlan::SERVICE != 0) as usize];
    let [.., id0, id1] = (tag & vlan::ID).to_be_bytes();
    [t0, t1, priority & 0xf0 | id0, id1]
}
