use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize, Serializer};

use crate::config::{Forward, Protocol};
use crate::method::Method;

/// What the daemon knows, as of its last tick.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Status {
    /// The services, in the order of the configuration.
    pub services: Vec<ServiceStatus>,
    /// The number of the configuration in force: 1 since the start, and one more with each change.
    pub generation: u64,
    /// The last change or reload since the start.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub last_change: Option<LastChange>,
    /// Ticks since the start that were not made, because something else took longer than a tick.
    pub missed_ticks: u64,
    /// The interfaces, in the order of the configuration.
    pub interfaces: Vec<InterfaceStatus>,
    /// What is in the flow table.
    pub flows: FlowsStatus,
    /// Refused packets since the maps were made, by the name of the reason.
    pub drops: BTreeMap<String, u64>,
    /// How long ago the selection rings were last judged, and written where they had to change, in milliseconds.
    pub selection_age_ms: u64,
    /// For how long the daemon had been running when this was taken, in milliseconds.
    pub uptime_ms: u64,
    /// What time the `window_*` figures cover, in milliseconds: less than the configured window at first.
    pub window_ms: u64,
}

/// What the last change or reload has come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LastChange {
    /// The number of the configuration in force since; the same as before if nothing was different.
    pub generation: u64,
    /// Services that were added, removed or looked through because something of them is different.
    pub services: u64,
    /// Backends that were added, removed or looked through with their services.
    pub backends: u64,
    /// How long it took the controller, in milliseconds, to three decimals. It is read and judged beside the controller.
    #[serde(serialize_with = "three_decimals")]
    pub took_ms: f64,
}

/// The flow table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FlowsStatus {
    /// Flows that fit (`max-flows`).
    pub room: u64,
    /// Flows that were there as it was last walked over, about a second ago: many half-open ones are a flood of SYNs.
    pub now: ByState,
    /// Flows that gave way to new ones since the maps were made, because there was no room.
    pub evicted: ByState,
}

/// A number of flows for each state of their life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ByState {
    /// TCP handshakes that are not complete, and UDP conversations without an answer.
    pub half_open: u64,
    /// Connections, and conversations that were answered.
    pub established: u64,
    /// Connections that have ended, and are remembered for a while.
    pub closing: u64,
}

/// One service.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ServiceStatus {
    /// Its name.
    pub name: String,
    /// What clients talk to.
    pub address: SocketAddr,
    /// Its protocol.
    pub protocol: Protocol,
    /// How the backend of a new flow is chosen.
    pub method: Method,
    /// How packets get to the backends.
    pub forward: Forward,
    /// The backends, in the order of the configuration.
    pub backends: Vec<BackendStatus>,
}

/// One backend of a service. Packets and bytes count both directions; bytes are IP total length.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BackendStatus {
    /// Its name.
    pub name: String,
    /// Where it listens.
    pub address: SocketAddr,
    /// Its configured weight, 0 to 100.
    pub weight: u8,
    /// What it is there for, and whether it can serve.
    pub state: BackendState,
    /// For how many seconds it has been in this state, to three decimals.
    #[serde(serialize_with = "three_decimals")]
    pub since_s: f64,
    /// Why, where there is more to say than the state's name says.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub reason: Option<String>,
    /// What its health checks have found, whatever the operator wants of it; only where the service has some.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub health: Option<HealthStatus>,
    /// Live flows.
    pub active: u64,
    /// Flows whose client waits for an answer; only where the service follows that.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub awaiting: Option<u64>,
    /// How long answers took within the window; only where the service follows that, and there were any.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub response_time: Option<ResponseTime>,
    /// How far its draining has come, if it drains.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub drain: Option<Drain>,
    /// Packets since the backend was added.
    pub packets: u64,
    /// Bytes since the backend was added.
    pub bytes: u64,
    /// Packets within the window.
    pub window_packets: u64,
    /// Bytes within the window.
    pub window_bytes: u64,
    /// Its load by the service's method, to two decimals.
    #[serde(serialize_with = "two_decimals")]
    pub n: f64,
    /// What its recent flows have yet to bring within the window, in N's unit, to two decimals.
    #[serde(serialize_with = "two_decimals")]
    pub committed: f64,
    /// The load that is compared, (N + committed) × 10000 / weight, to two decimals; `None` with weight 0.
    #[serde(serialize_with = "two_decimals_if_any")]
    pub nw: Option<f64>,
    /// Its share of the selection ring, 0 to 1, to four decimals.
    #[serde(serialize_with = "four_decimals")]
    pub share: f64,
}

/// How long the answers of a backend took (time to first byte), in milliseconds, to three decimals.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ResponseTime {
    /// How many there were.
    pub answers: u64,
    /// Their mean.
    #[serde(serialize_with = "three_decimals")]
    pub mean_ms: f64,
    /// Half of them took no longer, exact to a factor of two.
    #[serde(serialize_with = "three_decimals")]
    pub p50_ms: f64,
    /// 99 of 100 took no longer, exact to a factor of two.
    #[serde(serialize_with = "three_decimals")]
    pub p99_ms: f64,
}

/// The end of a backend's flows.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Drain {
    /// In how many seconds the flows that are left are ended.
    #[serde(serialize_with = "three_decimals")]
    pub deadline_s: f64,
    /// How many have ended in a second, since the draining began.
    #[serde(serialize_with = "three_decimals")]
    pub flows_per_s: f64,
    /// In how many seconds there will be none at this rate, at the latest at the deadline; `None` while none ends.
    pub estimate_s: Option<f64>,
}

/// What the health checks of a backend have found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HealthStatus {
    /// What they have come to.
    pub verdict: HealthVerdict,
    /// For how many seconds, to three decimals.
    #[serde(serialize_with = "three_decimals")]
    pub since_s: f64,
    /// Why.
    pub reason: String,
    /// How many of the last ones passed, one after the other.
    pub passed: u32,
    /// How many of the last ones failed, one after the other: 0 unless `passed` is.
    pub failed: u32,
    /// Why the last one failed that did.
    pub last_failure: Option<String>,
}

/// What health checks have come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum HealthVerdict {
    /// None has been made yet: the backend takes no flows before one passes.
    Unknown,
    /// The backend serves.
    Up,
    /// It does not.
    Down,
}

/// What a backend is there for, and whether it can serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BackendState {
    /// It takes new flows.
    Up,
    /// Its share of the new flows still grows, or it has not been checked yet.
    Starting,
    /// Its health checks have failed: it takes no new flows.
    Down,
    /// The operator gives it no new flows: its weight is 0.
    Disabled,
    /// There is no route to it, or its link-layer address is not known.
    Unreachable,
    /// The operator drains it: it takes no new flows.
    Draining,
    /// It is not configured any more, and goes with its last flow.
    Leaving,
}

impl fmt::Display for BackendState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            BackendState::Up => "up",
            BackendState::Starting => "starting",
            BackendState::Down => "down",
            BackendState::Disabled => "disabled",
            BackendState::Unreachable => "unreachable",
            BackendState::Draining => "draining",
            BackendState::Leaving => "leaving",
        })
    }
}

/// One interface that the program is attached to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct InterfaceStatus {
    /// Its name.
    pub name: String,
    /// How the program is really attached, or will be.
    pub mode: AttachedMode,
    /// What has become of it.
    pub state: InterfaceState,
}

/// What has become of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum InterfaceState {
    /// It carries the program, and is up.
    Up,
    /// It carries the program, and is down.
    Down,
    /// There is none of this name: as soon as there is, it gets the program.
    Missing,
    /// It is called otherwise now: nothing leaves by it.
    Renamed,
    /// Somebody took the program off.
    Detached,
    /// It appeared, and the program could not be attached.
    Refused,
}

impl fmt::Display for InterfaceState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            InterfaceState::Up => "up",
            InterfaceState::Down => "down",
            InterfaceState::Missing => "missing",
            InterfaceState::Renamed => "renamed",
            InterfaceState::Detached => "detached",
            InterfaceState::Refused => "refused",
        })
    }
}

/// How the program is really attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AttachedMode {
    /// In the driver.
    Native,
    /// In the kernel's receive path.
    Generic,
}

impl fmt::Display for AttachedMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            AttachedMode::Native => "native",
            AttachedMode::Generic => "generic",
        })
    }
}

pub(super) fn two_decimals<S: Serializer>(number: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64((number * 100.0).round() / 100.0)
}

fn three_decimals<S: Serializer>(number: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64((number * 1000.0).round() / 1000.0)
}

pub(super) fn two_decimals_if_any<S: Serializer>(
    number: &Option<f64>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match number {
        Some(number) => two_decimals(number, serializer),
        None => serializer.serialize_none(),
    }
}

pub(super) fn four_decimals<S: Serializer>(number: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64((number * 10_000.0).round() / 10_000.0)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A status in which every field says something.
    pub(crate) fn example() -> Status {
        let backend = |last: u8, weight| BackendStatus {
            name: format!("web-{last}"),
            address: ([10, 0, 0, last], 8080).into(),
            weight,
            state: if weight == 0 { BackendState::Unreachable } else { BackendState::Up },
            since_s: 12.3,
            reason: (weight == 0).then(|| "its link-layer address is not known".to_owned()),
            health: (weight > 0).then(|| HealthStatus {
                verdict: HealthVerdict::Up,
                since_s: 12.345_67,
                reason: "2 checks passed".to_owned(),
                passed: 0,
                failed: 1,
                last_failure: Some("connection refused".to_owned()),
            }),
            active: 3,
            awaiting: (weight > 0).then_some(2),
            response_time: (weight > 0).then_some(ResponseTime {
                answers: 5,
                mean_ms: 1.234_56,
                p50_ms: 1.0,
                p99_ms: 2.0,
            }),
            drain: (weight > 0).then_some(Drain {
                deadline_s: 9.5,
                flows_per_s: 0.25,
                estimate_s: Some(4.0),
            }),
            packets: 1000,
            bytes: 150_000_000,
            window_packets: 140,
            window_bytes: 17_500_000,
            n: 46.666_666,
            committed: 1.234_5,
            nw: (weight > 0).then(|| 466_666.666_6 / f64::from(weight)),
            share: if weight == 0 { 0.0 } else { 0.333_333_3 },
        };
        Status {
            services: vec![ServiceStatus {
                name: "web".to_owned(),
                address: ([192, 0, 2, 10], 80).into(),
                protocol: Protocol::Tcp,
                method: Method::LeastPackets,
                forward: Forward::Nat,
                backends: vec![backend(11, 2), backend(12, 0)],
            }],
            generation: 3,
            last_change: Some(LastChange { generation: 3, services: 1, backends: 2, took_ms: 1.234_56 }),
            missed_ticks: 4,
            interfaces: vec![InterfaceStatus {
                name: "eth0".to_owned(),
                mode: AttachedMode::Generic,
                state: InterfaceState::Up,
            }],
            flows: FlowsStatus {
                room: 1024,
                now: ByState { half_open: 5, established: 6, closing: 7 },
                evicted: ByState { half_open: 8, established: 0, closing: 1 },
            },
            drops: [("malformed".to_owned(), 7), ("fragment".to_owned(), 0)].into(),
            selection_age_ms: 12,
            uptime_ms: 3_600_000,
            window_ms: 14_000,
        }
    }

    #[test]
    fn the_document() {
        let document = serde_json::to_value(example()).expect("a document");
        let expected = serde_json::json!({
            "services": [{
                "name": "web", "address": "192.0.2.10:80", "protocol": "tcp",
                "method": "least-packets", "forward": "nat",
                "backends": [
                    {
                        "name": "web-11", "address": "10.0.0.11:8080", "weight": 2, "state": "up",
                        "since_s": 12.3, "health": {
                            "verdict": "up", "since_s": 12.346, "reason": "2 checks passed",
                            "passed": 0, "failed": 1, "last_failure": "connection refused"
                        },
                        "active": 3, "awaiting": 2,
                        "response_time": { "answers": 5, "mean_ms": 1.235, "p50_ms": 1.0, "p99_ms": 2.0 },
                        "drain": { "deadline_s": 9.5, "flows_per_s": 0.25, "estimate_s": 4.0 },
                        "packets": 1000, "bytes": 150_000_000,
                        "window_packets": 140, "window_bytes": 17_500_000,
                        "n": 46.67, "committed": 1.23, "nw": 233_333.33, "share": 0.3333
                    },
                    {
                        "name": "web-12", "address": "10.0.0.12:8080", "weight": 0, "state": "unreachable",
                        "since_s": 12.3, "reason": "its link-layer address is not known",
                        "active": 3, "packets": 1000, "bytes": 150_000_000,
                        "window_packets": 140, "window_bytes": 17_500_000,
                        "n": 46.67, "committed": 1.23, "nw": null, "share": 0.0
                    }
                ]
            }],
            "generation": 3,
            "last_change": { "generation": 3, "services": 1, "backends": 2, "took_ms": 1.235 },
            "missed_ticks": 4,
            "interfaces": [{ "name": "eth0", "mode": "generic", "state": "up" }],
            "flows": {
                "room": 1024,
                "now": { "half_open": 5, "established": 6, "closing": 7 },
                "evicted": { "half_open": 8, "established": 0, "closing": 1 }
            },
            "drops": { "malformed": 7, "fragment": 0 },
            "selection_age_ms": 12,
            "uptime_ms": 3_600_000,
            "window_ms": 14_000
        });
        assert_eq!(document, expected);
        let read: Status = serde_json::from_value(document).expect("a status");
        assert_eq!(serde_json::to_value(read).expect("a document"), expected);
    }
}
