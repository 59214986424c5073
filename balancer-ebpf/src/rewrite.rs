//! Changing a frame into the one that leaves.

use core::ptr;

use balancer_common::{FlowEntry, FlowKey, UDP};

use crate::{
    checksum::{self, Delta},
    parse::Parsed,
    source::Source,
};

/// What a direction of a flow makes of its packets: the entry's part of the rewrite, copied out of the table.
pub struct Translation {
    addresses: [[u8; 4]; 2],
    ports: [[u8; 2]; 2],
    ip_delta: u16,
    l4_delta: u16,
}

impl Translation {
    /// The entry's translation.
    #[inline(always)]
    pub fn of(entry: &FlowEntry) -> Translation {
        Translation {
            addresses: [entry.new_source, entry.new_destination],
            ports: [entry.new_source_port, entry.new_destination_port],
            ip_delta: entry.ip_delta,
            l4_delta: entry.l4_delta,
        }
    }

    /// That of a single datagram, which leaves with this source and this destination.
    #[inline(always)]
    pub fn new(key: &FlowKey, source: Source, destination: Source) -> Translation {
        let addresses = Delta::default()
            .address(key.source, source.address)
            .address(key.destination, destination.address);
        Translation {
            addresses: [source.address, destination.address],
            ports: [source.port, destination.port],
            ip_delta: addresses.and(Delta::TTL).fold(),
            l4_delta: addresses
                .word(key.source_port, source.port)
                .word(key.destination_port, destination.port)
                .fold(),
        }
    }
}

/// Writes MACs, addresses, ports, TTL − 1 and both checksums. The frame must have been parsed as `parsed`, with
/// a TTL above 1.
#[inline(always)]
pub fn rewrite(parsed: &Parsed, translation: &Translation, neighbour: [u8; 6], source: [u8; 6]) {
    let Parsed { ethernet, ip, ports, checksum, .. } = *parsed;
    // SAFETY: `parse` checked that all four lie in the frame; network-types' headers and byte arrays need no
    // more alignment than the even address that Ethernet's 14 bytes give.
    unsafe {
        (*ethernet).dst_addr = neighbour;
        (*ethernet).src_addr = source;
        (*ip).ttl = parsed.ttl - 1;
        (*ip).check = checksum::update((*ip).check, translation.ip_delta);
        (*ip).src_addr = translation.addresses[0];
        (*ip).dst_addr = translation.addresses[1];
        let [[s0, s1], [d0, d1]] = translation.ports;
        ptr::write_unaligned(ports, [s0, s1, d0, d1]);
        if let Some(sum) = l4_checksum(parsed.key.protocol, *checksum, translation.l4_delta) {
            *checksum = sum;
        }
    }
}

/// The TCP or UDP checksum after a change of `delta`; `None` where there is none to keep right.
///
/// UDP (RFC 768): a sum of 0 means that the sender made none, and a computed 0 is sent as ffff.
#[inline(always)]
fn l4_checksum(protocol: u8, old: [u8; 2], delta: u16) -> Option<[u8; 2]> {
    if protocol != UDP {
        return Some(checksum::update(old, delta));
    }
    if old == [0, 0] {
        return None;
    }
    match checksum::update(old, delta) {
        [0, 0] => Some([0xff, 0xff]),
        sum => Some(sum),
    }
}
