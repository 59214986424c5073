//! Clients that keep their backend.

use balancer_common::ability;

use super::{
    bed::{Bed, UNIT, VIP},
    frame::{Endpoint, Frame, SYN},
};

const TIMEOUT: u16 = 40;

/// Three backends that flows take in turn, but for clients that are remembered by so many bits.
fn persistent(prefix: u8) -> Bed {
    let mut bed = Bed::new(3);
    for service in bed.kernel.services.values_mut() {
        (service.persistence_prefix, service.persistence_timeout) = (prefix, TIMEOUT);
    }
    bed
}

fn from(client: [u8; 4], port: u16) -> Frame {
    Frame::tcp((client, port), VIP, SYN)
}

both! {
fn a_client_keeps_its_backend_and_others_have_theirs() {
    for (prefix, near) in [(128, false), (120, true), (97, true)] {
        let bed = persistent(prefix);
        assert_eq!(bed.request(&from([10, 0, 1, 10], 1)), 0);
        for port in 2..9 {
            assert_eq!(bed.request(&from([10, 0, 1, 10], port)), 0, "{prefix}");
        }
        // The remembered take no slots: the next new client has the next.
        assert_eq!(bed.request(&from([10, 0, 1, 11], 1)), if near { 0 } else { 1 }, "{prefix}");
        assert_eq!(bed.request(&from([172, 16, 0, 1], 1)), if near { 1 } else { 2 }, "{prefix}");
    }
}

fn each_new_flow_prolongs_it_and_silence_ends_it() {
    let bed = persistent(128);
    assert_eq!(bed.request(&from([10, 0, 1, 10], 1)), 0);
    for port in 2..5 {
        bed.wait(u32::from(TIMEOUT) * UNIT);
        assert_eq!(bed.request(&from([10, 0, 1, 10], port)), 0);
    }
    bed.wait(u32::from(TIMEOUT) * UNIT + 1);
    assert_eq!(bed.request(&from([10, 0, 1, 10], 9)), 1);
}

fn a_backend_that_takes_none_loses_its_clients() {
    let mut bed = persistent(128);
    assert_eq!(bed.request(&from([10, 0, 1, 10], 1)), 0);
    bed.kernel.backends[0].abilities = ability::SERVE;
    bed.set_ring(&[1, 2]);
    assert_eq!(bed.request(&from([10, 0, 1, 10], 2)), 1);
    bed.kernel.backends[0].abilities = ability::SERVE | ability::TAKE;
    assert_eq!(bed.request(&from([10, 0, 1, 10], 3)), 1, "it has another now");
    // One that belongs to another service is nobody.
    bed.kernel.backends[1].service = 1;
    assert_eq!(bed.request(&from([10, 0, 1, 10], 4)), 2);
}

fn the_services_are_apart_and_who_does_not_ask_remembers_nothing() {
    let client: Endpoint = ([10, 0, 1, 10], 7);
    let bed = persistent(128);
    bed.request(&from(client.0, 1));
    assert_eq!(bed.kernel.clients.borrow().len(), 1);
    bed.request(&Frame::udp(client, VIP, b"x"));
    let services: std::collections::HashSet<u16> =
        bed.kernel.clients.borrow().keys().map(|key| key.service).collect();
    assert_eq!(services, [0, 1].into());
    let bed = Bed::new(3);
    bed.request(&from(client.0, 1));
    assert_eq!(*bed.kernel.clients.borrow(), [].into());
    // The clock's zero is a time like others.
    let bed = persistent(128);
    bed.kernel.now.set(0);
    bed.request(&from(client.0, 1));
    assert_eq!(
        bed.kernel.clients.borrow().values().map(|value| (value.stamp, value.backend)).next(),
        Some((1, 0))
    );
}
}
