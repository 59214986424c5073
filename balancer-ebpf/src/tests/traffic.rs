//! Random traffic against a model that knows the RFCs and the rules of the house, but no table.

use std::{collections::HashMap, vec, vec::Vec};

use balancer_common::{FIRST_SNAT_PORT, FlowState, NO_TWIN, Reason, TCP, UDP, flags};
use proptest::{collection::vec as sequence, prelude::*};

use super::{
    bed::Bed,
    cases,
    frame::{ACK, Endpoint, FIN, Frame, L4, PSH, RST, SYN, address, l4_at, translated},
};
use crate::Verdict;

/// One packet, by what there is to choose from.
#[derive(Clone, Debug)]
struct Arrival {
    wait: u32,
    is_reply: bool,
    client: usize,
    vip: usize,
    backend: usize,
    is_tcp: bool,
    flags: u8,
    ttl: u8,
    payload: usize,
    is_summed: bool,
    has_options: bool,
}

const CLIENTS: [Endpoint; 4] = [
    ([10, 0, 1, 10], 40_000),
    ([10, 0, 1, 10], 40_001),
    ([10, 0, 3, 7], 40_000),
    (Bed::BACKENDS[0].0, 40_000),
];

fn arrivals() -> impl Strategy<Value = Vec<Arrival>> {
    let flags =
        prop::sample::select(&[SYN, SYN, SYN | ACK, ACK, ACK | PSH, FIN | ACK, RST, RST | ACK, FIN, 0][..]);
    let wait = prop_oneof![20 => Just(0), 5 => 0..200_u32, 1 => Just(1_601)];
    let ttl = prop_oneof![10 => 2_u8.., 1 => 0..2_u8];
    let payload = prop_oneof![10 => 0..40_usize, 1 => 1_400..1_500_usize];
    let who = (any::<bool>(), 0..CLIENTS.len(), 0..2_usize, 0..3_usize, prop::bool::weighted(0.7));
    let what = (wait, flags, ttl, payload, any::<bool>(), any::<bool>());
    let arrival = (who, what).prop_map(
        |((is_reply, client, vip, backend, is_tcp), (wait, flags, ttl, payload, is_summed, has_options))| {
            Arrival {
                wait,
                is_reply,
                client,
                vip,
                backend,
                is_tcp,
                flags,
                ttl,
                payload,
                is_summed,
                has_options,
            }
        },
    );
    sequence(arrival, 1..100)
}

impl Arrival {
    /// `seen_as` is where the flow's requests came from, as the backend saw it.
    fn frame(&self, seen_as: Endpoint) -> Frame {
        let (client, vip, backend) = (CLIENTS[self.client], Bed::VIPS[self.vip], Bed::BACKENDS[self.backend]);
        let (source, destination) = if self.is_reply { (backend, seen_as) } else { (client, vip) };
        let l4 = if self.is_tcp {
            L4::Tcp { flags: self.flags, options: if self.has_options { vec![1; 12] } else { vec![] } }
        } else {
            L4::Udp { is_summed: self.is_summed }
        };
        let options = if self.has_options { vec![1; 8] } else { vec![] };
        let payload = vec![0x5a; self.payload];
        Frame { ttl: self.ttl, l4, options, payload, ..Frame::tcp(source, destination, 0) }
    }

    fn protocol(&self) -> u8 {
        if self.is_tcp { TCP } else { UDP }
    }
}

/// By client, service address and protocol: the backend that the last request reached, and the source that it saw.
type Flows = HashMap<(usize, usize, u8), (usize, Endpoint)>;

/// Asserts that a request left as one to some backend, and nothing else of it changed but the source, if there is one to
/// give: `snat`.
fn check_request(arrival: &Arrival, input: &[u8], output: &[u8], flows: &mut Flows, snat: [u8; 4]) {
    let backend = Bed::BACKEND_MACS.iter().position(|mac| *mac == output[..6]).expect("not to a backend");
    let client = CLIENTS[arrival.client];
    let l4 = l4_at(output);
    let seen_as = (output[26..30].try_into().unwrap(), u16::from_be_bytes([output[l4], output[l4 + 1]]));
    if seen_as != client {
        assert!(snat != [0; 4] && seen_as.0 == snat && seen_as.1 >= FIRST_SNAT_PORT, "{seen_as:?}");
    }
    assert_ne!(seen_as.0, Bed::BACKENDS[backend].0, "source = destination");
    let to = Bed::BACKEND_MACS[backend];
    assert_eq!(output, translated(input, to, Bed::BACKEND_SIDE, seen_as, Bed::BACKENDS[backend]));
    let flow = (arrival.client, arrival.vip, arrival.protocol());
    let before = flows.insert(flow, (backend, seen_as));
    // What opens nothing stays with its backend.
    if arrival.is_tcp && arrival.flags & (SYN | ACK) != SYN {
        assert_eq!(before, Some((backend, seen_as)));
    }
}

/// Asserts that a reply left for the client of the one flow that it can belong to.
fn check_reply(arrival: &Arrival, seen_as: Endpoint, input: &[u8], output: &[u8], flows: &Flows) {
    let fits = flows.iter().filter(|((client, vip, protocol), seen)| {
        let (client, vip) = (CLIENTS[*client], Bed::VIPS[*vip]);
        let expected = translated(input, Bed::CLIENT_MAC, Bed::CLIENT_SIDE, vip, client);
        *protocol == arrival.protocol() && **seen == (arrival.backend, seen_as) && output == expected
    });
    assert_eq!(fits.count(), 1, "{arrival:?} left as {output:02x?}");
}

/// Asserts that the two entries of each flow name each other, agree, and that no place is left over.
fn check_table(bed: &Bed) {
    let memory = &bed.kernel.memory;
    memory.assert_consistent();
    bed.kernel.assert_active_is_exact();
    for (index, entry) in memory.live() {
        if entry.twin == NO_TWIN {
            // A port that rests.
            assert!(entry.holds_port() && entry.timeout == 0 && !memory.is_protected(index));
            continue;
        }
        let twin = memory.entry(entry.twin);
        assert_eq!(twin.twin, index);
        let marks =
            |entry: balancer_common::FlowEntry| entry.control.flags() & !(flags::REPLY | flags::ACTIVE);
        assert_eq!((entry.control.state(), marks(entry)), (twin.control.state(), marks(twin)));
        assert_eq!((entry.backend, entry.timeout, entry.service), (twin.backend, twin.timeout, twin.service));
        assert_eq!((entry.control.flags() ^ twin.control.flags()) & flags::REPLY, flags::REPLY);
        let is_protected = [FlowState::Established, FlowState::OneWay].contains(&entry.control.state());
        assert_eq!(memory.is_protected(index), is_protected);
        assert_eq!(
            (entry.new_source, entry.new_source_port),
            (twin.key.destination, twin.key.destination_port)
        );
        assert_eq!(
            (entry.new_destination, entry.new_destination_port),
            (twin.key.source, twin.key.source_port)
        );
    }
}

/// With `snat` as the source to give, if it is an address: to who is on the backends' network, and where replies would
/// look alike.
fn run(arrivals: &[Arrival], buckets: u32, start: u32, snat: Option<[u8; 4]>) {
    let mut bed = Bed::with_table(3, buckets);
    bed.kernel.now.set(start);
    for backend in &mut bed.kernel.backends {
        (backend.snat_address, backend.snat_prefix) = (snat.map_or([0; 16], address), 120);
    }
    let mut flows = Flows::new();
    let mut forwarded = [0_u64; 4];
    let mut by_service = [0_u64; 2];
    let mut drops = 0;
    bed.kernel.profiled_age = u32::MAX;
    for arrival in arrivals {
        bed.kernel.now.set(bed.kernel.now.get().wrapping_add(arrival.wait));
        let flow = (arrival.client, arrival.vip, arrival.protocol());
        let seen_as = flows.get(&flow).map_or(CLIENTS[arrival.client], |(_, seen_as)| *seen_as);
        let input = arrival.frame(seen_as).bytes();
        let (verdict, output) = bed.run(if arrival.is_reply { 2 } else { 1 }, &input);
        match verdict {
            Verdict::Pass | Verdict::Drop => assert_eq!(output, input),
            Verdict::Transmit => panic!("no frame leaves by where it came in"),
            Verdict::Redirect(port) => {
                assert_eq!(port, u16::from(!arrival.is_reply));
                assert!(arrival.ttl > 1 && input.len() - 14 <= usize::from(Bed::MTU));
                if arrival.is_reply {
                    check_reply(arrival, seen_as, &input, &output, &flows);
                } else {
                    check_request(arrival, &input, &output, &mut flows, snat.unwrap_or_default());
                }
                let place = if arrival.is_reply { 2 } else { 0 };
                forwarded[place] += 1;
                by_service[usize::from(!arrival.is_tcp)] += 1;
                forwarded[place + 1] += input.len() as u64 - 14;
            }
        }
        // Only the kernel's own packets pass: here, replies of no flow.
        assert!(verdict != Verdict::Pass || arrival.is_reply);
        drops += u64::from(verdict == Verdict::Drop);
        assert_eq!((bed.traffic(), bed.kernel.dropped()), (forwarded, drops));
        check_table(&bed);
    }
    // Some flows may have grown older than the profile reaches.
    let is_young = arrivals.iter().map(|arrival| arrival.wait).sum::<u32>() < 8_192;
    for (service, packets) in by_service.into_iter().enumerate() {
        let profiled = bed.kernel.profiled(service).ages.iter().map(|traffic| traffic.packets).sum::<u64>();
        assert!(profiled == packets || (!is_young && profiled < packets), "{profiled} of {packets}");
    }
    let others = [Reason::Fragment, Reason::NoBackend, Reason::NoNeighbour, Reason::NoEgress];
    assert!(
        bed.kernel.drops().iter().all(|(reason, _)| !others.contains(reason)),
        "{:?}",
        bed.kernel.drops()
    );
}

proptest! {
    #![proptest_config(cases(250))]

    #[test]
    fn random_traffic_is_forwarded_by_the_rules(arrivals in arrivals(), start in prop_oneof![Just(u32::MAX - 300), any::<u32>()]) {
        run(&arrivals, 16, start, None);
    }

    /// The same in a table that is nearly always full.
    #[test]
    fn random_traffic_in_a_full_table(arrivals in arrivals(), start: u32) {
        run(&arrivals, 1, start, None);
    }

    #[test]
    fn random_traffic_with_a_source_to_give(
        arrivals in arrivals(), start: u32, buckets in prop::sample::select(&[1_u32, 64][..]),
    ) {
        run(&arrivals, buckets, start, Some([10, 0, 2, 1]));
    }
}
