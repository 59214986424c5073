//! Where the packets of a flow come from, as its backend sees them: the client itself, or an address and port of ours where
//! the replies would not come through here otherwise, or could not be told from those of another flow.

use balancer_common::{Address, Backend, FlowKey, Reason, family, unmapped};

use crate::{Environment, persist::leading, rounds::Rounds, table};

/// How many ports a flow tries whose source is translated.
const PORT_TRIES: usize = 8;

/// An address and port. Aligned, since the kernel refuses to see a half word at an odd place of the stack.
#[derive(Clone, Copy)]
#[repr(align(8))]
pub struct Source {
    /// Address, as keys have it.
    pub address: [u8; 4],
    /// Port, network order.
    pub port: [u8; 2],
}

impl Source {
    /// The client's own.
    #[inline(always)]
    pub const fn of(key: &FlowKey) -> Source {
        Source { address: key.source, port: key.source_port }
    }
}

/// An address as keys of this family have it.
#[inline(always)]
pub fn short<E: Environment>(environment: &E, family: u8, address: &Address) -> [u8; 4] {
    if family == family::IPV4 { unmapped(address) } else { table::digest(address, environment.seed()) }
}

/// The key of a flow's replies: from this port of the backend.
#[inline(always)]
pub fn reply_key<E: Environment>(
    environment: &E,
    key: &FlowKey,
    backend: &Backend,
    port: [u8; 2],
    source: Source,
) -> FlowKey {
    FlowKey {
        source: short(environment, key.family, &backend.address),
        destination: source.address,
        source_port: port,
        destination_port: source.port,
        ..*key
    }
}

/// Whether the client is on the network that the backend's replies would reach past us.
#[inline(always)]
pub fn is_near(client: &Address, backend: &Backend) -> bool {
    leading(client, backend.snat_prefix) == leading(&backend.address, backend.snat_prefix)
}

/// A source of ours whose replies no other flow has, nor had a short while ago: its port.
#[inline(always)]
pub fn give<E: Environment>(
    environment: &E,
    key: &FlowKey,
    backend: &Backend,
    now: u32,
) -> Result<[u8; 2], Reason> {
    // The time is in it, so that a client that comes again from the same port does not meet the ports that rest since.
    let [a, b, c, _] = now.to_le_bytes();
    let key_now = FlowKey { family: a, reserved: [b, c], ..*key };
    let lot = table::mix(bytemuck::cast(key_now), environment.seed());
    let address = short(environment, key.family, &backend.snat_address);
    for attempt in Rounds::new(PORT_TRIES) {
        let source = Source { address, port: candidate(backend.snat_ports, lot, attempt as u64) };
        let reply = reply_key(environment, key, backend, backend.port, source);
        let over = table::find(environment, &reply, table::hash(environment, &reply));
        if !over.exists() {
            return Ok(source.port);
        }
        if table::has_rested(environment, &over, now) {
            table::release(environment, &over);
            return Ok(source.port);
        }
    }
    Err(Reason::NoSourcePort)
}

/// One of these ports, another for each attempt as long as there are as many.
#[inline(always)]
fn candidate([first, last]: [u16; 2], lot: u64, attempt: u64) -> [u8; 2] {
    let ports = u64::from(last.wrapping_sub(first)) + 1;
    let step = 1 + (lot & 0xffff) % (ports / PORT_TRIES as u64).max(1);
    let place = ((lot >> 16) + attempt * step) % ports;
    first.wrapping_add(place as u16).to_be_bytes()
}
