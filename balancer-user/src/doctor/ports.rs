//! The ports that the kernel takes for this host's own connections, which clients must not be given.

use std::fs;

use super::Finding;
use crate::config::{Service, Snat};

/// That the kernel takes ports for this host's own connections that the program gives to clients of these services: the
/// replies of two such connections to one backend would look alike.
pub fn shared_ports<'a>(services: impl Iterator<Item = &'a Service>) -> Option<Finding> {
    let given = given(services)?;
    let setting = |name: &str| fs::read_to_string(format!("/proc/sys/net/ipv4/{name}")).unwrap_or_default();
    let [range, reserved] = ["ip_local_port_range", "ip_local_reserved_ports"].map(setting);
    let (first, last) = shared(given, &range, &reserved)?;
    let [lowest, highest] = given;
    Some(Finding::warning(
        "net.ipv4.ip_local_port_range",
        format!(
            "this host's own connections may come from the ports {first} to {last}, which clients are given as well"
        ),
        format!(
            "lower net.ipv4.ip_local_port_range to end at {}, or add {lowest}-{highest} to \
             net.ipv4.ip_local_reserved_ports",
            lowest - 1
        ),
    ))
}
/// The ports that clients may be given with a source of this host's: the first and the last; `None` if none is.
fn given<'a>(services: impl Iterator<Item = &'a Service>) -> Option<[u16; 2]> {
    let giving =
        services.filter(|service| !service.forward.mode.is_one_way() && service.forward.snat != Snat::Never);
    giving
        .map(|service| service.forward.snat_ports.0)
        .reduce(|[a, b], [first, last]| [a.min(first), b.max(last)])
}

/// The first and the last port that the kernel takes of these, by the texts of its two settings; `None` if there is none, or if the
/// range is not understood.
fn shared([lowest, highest]: [u16; 2], range: &str, reserved: &str) -> Option<(u16, u16)> {
    let mut ends = range.split_ascii_whitespace().map(str::parse::<u16>);
    let (first, last) = (ends.next()?.ok()?, ends.next()?.ok()?);
    let reserved: Vec<(u16, u16)> = reserved
        .trim()
        .split(',')
        .filter_map(|part| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            Some((first.parse().ok()?, last.parse().ok()?))
        })
        .collect();
    let is_free = |port: &u16| reserved.iter().all(|(first, last)| !(first..=last).contains(&port));
    let mut ports = (first.max(lowest)..=last.min(highest)).filter(is_free);
    let lowest = ports.next()?;
    Some((lowest, ports.next_back().unwrap_or(lowest)))
}

#[cfg(test)]
mod tests {
    use balancer_common::FIRST_SNAT_PORT;

    use super::*;

    #[test]
    fn ports_are_shared_that_neither_end_nor_reservation_keeps_apart() {
        for (range, reserved, expected) in [
            ("32768\t60999\n", "\n", None),
            ("32768\t61000\n", "\n", Some((61_000, 61_000))),
            ("1024\t65535\n", "\n", Some((61_000, 65_535))),
            ("62000\t63000\n", "", Some((62_000, 63_000))),
            ("32768\t65535\n", "61000-65535\n", None),
            ("32768\t65535\n", "80,8080,61000-65000,65001-65535\n", None),
            ("32768\t65535\n", "61000-65000,65535\n", Some((65_001, 65_534))),
            ("32768\t65535\n", "8080\n", Some((61_000, 65_535))),
            ("", "", None),
            ("a b", "", None),
        ] {
            assert_eq!(
                shared([FIRST_SNAT_PORT, u16::MAX], range, reserved),
                expected,
                "{range:?} {reserved:?}"
            );
        }
    }
}
