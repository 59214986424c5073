//! Where the packets of a flow come from, as its backend sees them: the client itself, or an address and port of ours where
//! the replies would not come through here otherwise, or could not be told from those of another flow.

use balancer_common::{Backend, FIRST_SNAT_PORT, FlowKey, Reason};

use crate::{Environment, table};

/// How many ports a flow tries whose source is translated.
const PORT_TRIES: u64 = 8;
/// How many ports there are for that.
const PORTS: u64 = (1 << 16) - FIRST_SNAT_PORT as u64;

/// An address and port. Aligned, since the kernel refuses to see a half word at an odd place of the stack.
#[derive(Clone, Copy)]
#[repr(align(8))]
pub struct Source {
    /// Address, network order.
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

/// The key of a flow's replies.
#[inline(always)]
pub fn reply_key(key: &FlowKey, backend: &Backend, source: Source) -> FlowKey {
    FlowKey {
        source: backend.address,
        destination: source.address,
        source_port: backend.port,
        destination_port: source.port,
        ..*key
    }
}

/// Whether the client is on the network that the backend's replies would reach past us.
#[inline(always)]
pub fn is_near(key: &FlowKey, backend: &Backend) -> bool {
    let [client, address, mask] = [key.source, backend.address, backend.snat_mask].map(u32::from_ne_bytes);
    (client ^ address) & mask == 0
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
    let lot = table::mix(&FlowKey { reserved: [a, b, c], ..*key }, environment.seed());
    for attempt in 0..PORT_TRIES {
        let source = Source { address: backend.snat_address, port: candidate(lot, attempt) };
        let reply = reply_key(key, backend, source);
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

/// One of `PORTS` ports, another for each attempt.
#[inline(always)]
fn candidate(lot: u64, attempt: u64) -> [u8; 2] {
    let step = 1 + (lot & 0xffff) % (PORTS / PORT_TRIES);
    let place = ((lot >> 16) + attempt * step) % PORTS;
    (FIRST_SNAT_PORT + place as u16).to_be_bytes()
}
