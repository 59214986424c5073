//! The data plane on the host: the same code as in the kernel, between a buffer and maps made of vectors.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

/// Makes two tests of one: with IPv4, and with IPv6.
macro_rules! both {
    ($($(#[$meta:meta])* fn $name:ident() $body:block)*) => {$(
        $(#[$meta])*
        mod $name {
            use super::*;

            #[test]
            fn ipv4() $body

            #[test]
            fn ipv6() {
                $crate::host::frame::FAMILY.set(balancer_common::family::IPV6);
                $body
            }
        }
    )*};
}

mod causes;
mod checksum;
mod control;
mod corpus;
mod every;
mod exchange;
mod fragments;
mod full;
mod hashed;
mod lifetime;
mod media;
mod modes;
mod neighbours;
mod one_packet;
mod parse;
mod persist;
mod process;
mod race;
mod state;
mod table;
mod traffic;
mod translation;
mod turns;
mod unwrap;
mod vlan;

use proptest::test_runner::Config;

use crate::host::{bed, buffer, frame};

/// A property test of this many cases, which writes no file when it fails: its message has the input.
fn cases(count: u32) -> Config {
    Config { cases: count, failure_persistence: None, ..Config::default() }
}
