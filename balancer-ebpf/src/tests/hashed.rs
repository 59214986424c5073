//! Services whose backend follows from a hash.

use std::vec::Vec;

use balancer_common::{Reason, selector};

use super::{
    bed::{Bed, FIN_ACK, SYN_ACK, UNIT, VIP, to_client, to_vip},
    frame::{ACK, FIN, Frame, PSH, RST, SYN},
};

fn hashed(selector: u8) -> Bed {
    let mut bed = Bed::new(3);
    for service in bed.kernel.services.values_mut() {
        service.selector = selector;
    }
    bed
}

both! {
/// What belongs into the middle of a connection goes where its SYN would have gone.
fn a_segment_without_a_flow_goes_where_the_hash_says() {
    for selector in [selector::SOURCE, selector::FLOW] {
        let mut seen = Vec::new();
        for port in 0..60 {
            let client = ([10, 0, 1, 10 + port as u8], 40_000 + port);
            let [opened, found] = [SYN, PSH | ACK].map(|flags| {
                let bed = hashed(selector);
                bed.request(&Frame::tcp(client, VIP, flags))
            });
            assert_eq!(opened, found, "{selector} {client:?}");
            seen.push(opened);
        }
        for backend in 0..3 {
            assert!(seen.iter().filter(|other| **other == backend).count() > 5, "{selector}: {seen:?}");
        }
    }
}

/// Unproven until the backend goes on with it: until then it lives as long as a half-open flow.
fn such_a_flow_is_established_by_the_backend() {
    for answered in [false, true] {
        let bed = hashed(selector::FLOW);
        let backend = bed.request(&to_vip(ACK));
        if answered {
            bed.reply(&to_client(backend, PSH | ACK), VIP);
            assert_eq!(bed.request(&to_vip(ACK)), backend);
        }
        bed.wait(u32::from(Bed::TCP_SERVICE.half_open_timeout) * UNIT + 1);
        bed.request(&to_vip(PSH | ACK));
        assert_eq!(bed.flows().0, if answered { 1 } else { 2 });
    }
}

fn what_opens_no_connection_anywhere_opens_none_here() {
    for flags in [RST, RST | ACK, SYN_ACK] {
        hashed(selector::FLOW).refused(1, &to_vip(flags).bytes(), Reason::UnknownFlow);
    }
    for flags in [0, SYN | FIN, SYN | RST] {
        hashed(selector::FLOW).refused(1, &to_vip(flags).bytes(), Reason::Malformed);
    }
    for flags in [ACK, FIN_ACK] {
        Bed::new(3).refused(1, &to_vip(flags).bytes(), Reason::UnknownFlow);
    }
}
}
