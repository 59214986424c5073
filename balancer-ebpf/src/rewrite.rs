//! Changing a frame into the one that leaves.

use core::ptr;

use balancer_common::{Address, FlowKey, UDP, family, unmapped};
use network_types::ip::{Ipv4Hdr, Ipv6Hdr};

use crate::{
    Environment,
    checksum::{self, Delta},
    parse::Parsed,
    table::Found,
};

/// What a direction of a flow makes of its packets: the entry's part of the rewrite, copied out of the table.
pub struct Translation {
    /// Source and destination; of IPv4, in the low half of the first word each.
    addresses: [[u64; 2]; 2],
    ports: [[u8; 2]; 2],
    ip_delta: u16,
    l4_delta: u16,
}

impl Translation {
    /// The translation of an entry, by its family.
    #[inline(always)]
    pub fn of<E: Environment>(environment: &E, found: &Found) -> Translation {
        let entry = found.entry.flow();
        let mut addresses = [entry.new_source, entry.new_destination]
            .map(|address| [u64::from(u32::from_ne_bytes(address)), 0]);
        if entry.key.family != family::IPV4
            && let Some(whole) = environment.addresses(found.index)
        {
            // SAFETY: valid and aligned. What another CPU writes meanwhile shows in the control word's sequence.
            let whole = unsafe { &*whole };
            addresses = [bytemuck::cast(whole.new_source), bytemuck::cast(whole.new_destination)];
        }
        Translation {
            addresses,
            ports: [entry.new_source_port, entry.new_destination_port],
            ip_delta: entry.ip_delta,
            l4_delta: entry.l4_delta,
        }
    }

    /// That of a single datagram which is to go to another destination, address and port.
    #[inline(always)]
    pub fn to(parsed: &Parsed, address: &Address, port: [u8; 2]) -> Translation {
        let FlowKey { family, source_port, destination_port, .. } = parsed.key;
        let addresses = Delta::default().address(&parsed.destination(), address);
        Translation {
            addresses: [in_header(family, &parsed.source()), in_header(family, address)],
            ports: [source_port, port],
            ip_delta: addresses.and(Delta::TTL).fold(),
            l4_delta: addresses.word(destination_port, port).fold(),
        }
    }

    /// That of a single datagram which is to come from another source.
    #[inline(always)]
    pub fn from(parsed: &Parsed, address: &Address, port: [u8; 2]) -> Translation {
        let FlowKey { family, source_port, destination_port, .. } = parsed.key;
        let addresses = Delta::default().address(&parsed.source(), address);
        Translation {
            addresses: [in_header(family, address), in_header(family, &parsed.destination())],
            ports: [port, destination_port],
            ip_delta: addresses.and(Delta::TTL).fold(),
            l4_delta: addresses.word(source_port, port).fold(),
        }
    }
}

/// An address as the headers of this family have it: of IPv4, in the low half of the first word.
#[inline(always)]
pub fn in_header(family: u8, address: &Address) -> [u64; 2] {
    if family == family::IPV4 {
        [u64::from(u32::from_ne_bytes(unmapped(address))), 0]
    } else {
        bytemuck::cast(*address)
    }
}

/// Writes MACs, addresses and the checksums, takes `hops` off the TTL, and writes the ports where there are any. The frame must
/// have been parsed as `parsed`, with a TTL above `hops`, for which the translation is made.
#[inline(always)]
pub fn rewrite(parsed: &Parsed, translation: &Translation, hops: u8, neighbour: [u8; 6], source: [u8; 6]) {
    let Parsed { ethernet, ip, ports, checksum, .. } = *parsed;
    let [from, to] = translation.addresses;
    // SAFETY: `parse` checked that all of them lie in the frame; network-types' headers and byte arrays need no
    // more alignment than the even address that Ethernet's 14 bytes give.
    unsafe {
        (*ethernet).dst_addr = neighbour;
        (*ethernet).src_addr = source;
        if parsed.key.family == family::IPV4 {
            let ip: *mut Ipv4Hdr = ip.cast();
            (*ip).ttl = parsed.ttl - hops;
            (*ip).check = checksum::update((*ip).check, translation.ip_delta);
            (*ip).src_addr = (from[0] as u32).to_ne_bytes();
            (*ip).dst_addr = (to[0] as u32).to_ne_bytes();
        } else {
            let ip: *mut Ipv6Hdr = ip.cast();
            (*ip).hop_limit = parsed.ttl - hops;
            (*ip).src_addr = bytemuck::cast(from);
            (*ip).dst_addr = bytemuck::cast(to);
        }
        if parsed.is_rest {
            return;
        }
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
