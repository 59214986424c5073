//! Requests and answers: what begins an exchange, what ends it, and what it is counted as.

use std::vec;

use balancer_common::{ResponseTimes, option};

use super::{
    bed::{Bed, FIN_ACK, UNIT, VIP, answer, datagram, to_client, to_vip},
    frame::{ACK, Frame, PSH, RST, SYN},
};

/// One backend and one TCP connection, whose client's first byte has number 100 and whose backend's has 500.
struct Connection {
    bed: Bed,
}

fn followed() -> Bed {
    let mut bed = Bed::new(1);
    for service in bed.kernel.services.values_mut() {
        service.options = option::EXCHANGES;
    }
    bed
}

impl Connection {
    fn new() -> Connection {
        let bed = followed();
        bed.request(&Frame { sequence: [99, 0], ..to_vip(SYN) });
        bed.reply(&Frame { sequence: [499, 100], ..to_client(0, SYN | ACK) }, VIP);
        bed.request(&Frame { sequence: [100, 500], ..to_vip(ACK) });
        Connection { bed }
    }

    /// The client sends bytes from `from` on, and has received those below `received`.
    fn ask(&self, at: u32, from: u32, length: usize, received: u32) {
        self.bed.kernel.precise.set(at);
        let frame = Frame { sequence: [from, received], payload: vec![1; length], ..to_vip(PSH | ACK) };
        self.bed.request(&frame);
    }

    fn answer(&self, at: u32, from: u32, length: usize, received: u32) {
        self.bed.kernel.precise.set(at);
        let frame = Frame { sequence: [from, received], payload: vec![2; length], ..to_client(0, PSH | ACK) };
        self.bed.reply(&frame, VIP);
    }

    /// Exchanges begun and ended; how many were timed, and their times' sum.
    fn counts(&self) -> [u64; 4] {
        counts(&self.bed)
    }
}

fn counts(bed: &Bed) -> [u64; 4] {
    let (counters, times) = (bed.kernel.counted(0), bed.kernel.response_times(0));
    [counters.asked, counters.answered, times.count, times.sum]
}

both! {
fn a_request_is_timed_from_its_first_byte_to_the_first_of_its_answer() {
    let connection = Connection::new();
    assert_eq!(connection.counts(), [0; 4], "the handshake is no exchange");
    connection.ask(1_000, 100, 10, 500);
    connection.ask(1_100, 110, 10, 500);
    connection.answer(1_200, 500, 0, 120);
    assert_eq!(connection.counts(), [1, 0, 0, 0], "an acknowledgement is no answer");
    connection.answer(1_700, 500, 1_000, 120);
    connection.answer(1_800, 1_500, 1_000, 120);
    assert_eq!(connection.counts(), [1, 1, 1, 700]);
    // Across the wrap of the clock, and of nothing else.
    connection.ask(u32::MAX - 9, 120, 10, 2_500);
    connection.answer(90, 2_500, 5, 130);
    let times = connection.bed.kernel.response_times(0);
    let mut histogram = [0; balancer_common::RESPONSE_BUCKETS];
    (histogram[10], histogram[7]) = (1, 1);
    assert_eq!(times, ResponseTimes { sum: 800, count: 2, histogram });
}

fn what_is_sent_again_begins_and_ends_nothing() {
    let connection = Connection::new();
    connection.ask(1_000, 100, 10, 500);
    connection.ask(1_500, 100, 10, 500);
    connection.answer(2_000, 500, 100, 110);
    assert_eq!(connection.counts(), [1, 1, 1, 1_000], "timed from the first time it was sent");
    // The answer was lost, and so both go out again.
    connection.ask(2_200, 100, 10, 500);
    connection.answer(2_201, 500, 100, 110);
    assert_eq!(connection.counts(), [1, 1, 1, 1_000]);
    // The next request is not answered by the last answer, but by its own, or by one that holds both.
    connection.ask(3_000, 110, 10, 600);
    connection.answer(3_001, 500, 100, 120);
    assert_eq!(connection.counts(), [2, 1, 1, 1_000]);
    connection.answer(3_400, 500, 150, 120);
    assert_eq!(connection.counts(), [2, 2, 2, 1_400]);
}

fn sequence_numbers_wrap() {
    let bed = followed();
    bed.request(&Frame { sequence: [u32::MAX - 4, 0], ..to_vip(SYN) });
    bed.reply(&Frame { sequence: [u32::MAX - 4, 0], ..to_client(0, SYN | ACK) }, VIP);
    let connection = Connection { bed };
    connection.ask(0, u32::MAX - 3, 10, u32::MAX - 3);
    connection.answer(5, u32::MAX - 3, 10, 6);
    connection.ask(10, u32::MAX - 3, 10, u32::MAX - 3);
    assert_eq!(connection.counts(), [1, 1, 1, 5]);
    connection.ask(20, 6, 1, 6);
    connection.answer(30, 6, 1, 7);
    assert_eq!(connection.counts(), [2, 2, 2, 15]);
}

/// A client that gave up, without a word, and tries again from the same port: its numbers count, also where they are lower.
fn requests_are_those_of_the_last_handshake() {
    let bed = followed();
    bed.request(&Frame { sequence: [2_000_000_000, 0], ..to_vip(SYN) });
    bed.request(&Frame { sequence: [99, 0], ..to_vip(SYN) });
    bed.reply(&Frame { sequence: [499, 100], ..to_client(0, SYN | ACK) }, VIP);
    bed.request(&Frame { sequence: [100, 500], ..to_vip(ACK) });
    let connection = Connection { bed };
    connection.ask(1_000, 100, 10, 500);
    assert_eq!(connection.counts(), [1, 0, 0, 0]);
    connection.answer(1_700, 500, 1_000, 110);
    assert_eq!(connection.counts(), [1, 1, 1, 700]);
}

fn a_failure_ends_the_exchange_and_is_no_answer() {
    for end in [&[to_client(0, RST | ACK)][..], &[to_client(0, FIN_ACK)]] {
        let connection = Connection::new();
        connection.ask(1_000, 100, 10, 500);
        for frame in end {
            connection.bed.reply(frame, VIP);
        }
        connection.bed.request(&to_vip(FIN_ACK));
        assert_eq!(connection.counts(), [1, 1, 0, 0], "{end:?}");
        connection.bed.kernel.assert_active_is_exact();
    }
    let connection = Connection::new();
    connection.ask(1_000, 100, 10, 500);
    connection.bed.wait(u32::from(Bed::TCP_SERVICE.idle_timeout) * UNIT + 1);
    connection.bed.request(&Frame { sequence: [7, 0], ..to_vip(SYN) });
    assert_eq!(connection.counts(), [1, 1, 0, 0], "a flow that expired and gave way");
}

fn datagrams_are_exchanges_too() {
    let bed = followed();
    bed.kernel.precise.set(10);
    bed.request(&datagram());
    bed.request(&datagram());
    bed.kernel.precise.set(40);
    bed.reply(&answer(0), VIP);
    bed.reply(&answer(0), VIP);
    assert_eq!(counts(&bed), [1, 1, 1, 30]);
    bed.request(&datagram());
    assert_eq!(counts(&bed), [2, 1, 1, 30]);
}

fn a_service_that_does_not_ask_for_it_pays_nothing() {
    let bed = Bed::new(1);
    bed.request(&datagram());
    bed.reply(&answer(0), VIP);
    assert_eq!(counts(&bed), [0; 4]);
}
}
