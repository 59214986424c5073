//! The path that frames take: a client's device, the balancer's, and for who forwards through the kernel, a backend's.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use aya::programs::xdp::XdpLink;
use balancer_harness::{Packets, names};
use balancer_tests::{
    Netns, eventually,
    harness::Harness,
    program::{BACKEND_PORT, BACKEND_SIDE, CLIENT, CLIENT_SIDE, VIP, VIP_PORT, backend_address, backend_mac},
    veth::{End, pair},
};

/// How long the last packets may take to arrive.
const PATIENCE: Duration = Duration::from_secs(5);
/// Connections that nftables may track: more than there are flows.
const TRACKED: &str = "4194304";
/// Where that is set, for the whole machine.
const LIMIT: &str = "/proc/sys/net/netfilter/nf_conntrack_max";
/// Where the size of its hash table is set, which should be no smaller.
const BUCKETS: &str = "/sys/module/nf_conntrack/parameters/hashsize";

/// The namespaces and devices.
pub struct Road {
    client: Netns,
    pub balancer: Netns,
    backend: Netns,
    client_device: u32,
    /// The device that the program under test is attached to.
    pub device: u32,
    /// The client's: it counts what comes back.
    _sink: XdpLink,
    restore: Restore,
}

/// Where packets arrive in the end.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// At the harness's sink.
    Sink,
    /// At the backend.
    Backend,
}

impl Road {
    /// Makes it.
    pub fn new(harness: &mut Harness) -> Result<Road> {
        let [client, balancer, backend] =
            [Netns::new("client")?, Netns::new("balancer")?, Netns::new("backend")?];
        let end = |netns, device, mac| End { netns, device, mac: Some(mac) };
        pair(end(&client, "c0", CLIENT), end(&balancer, "l0", CLIENT_SIDE), 1500)?;
        pair(end(&balancer, "k0", BACKEND_SIDE), end(&backend, "b0", backend_mac(0)), 1500)?;
        let [client_device, device] = [client.device_index("c0")?, balancer.device_index("l0")?];
        let sink = client.run(|| {
            harness.send_by(client_device)?;
            harness.attach(names::SINK, client_device)
        })?;
        Ok(Road {
            client,
            balancer,
            backend,
            client_device,
            device,
            _sink: sink,
            restore: Restore::default(),
        })
    }

    /// Makes the balancer's namespace forward by the kernel, with the destination rewritten by nftables.
    pub fn forward_by_nftables(&mut self) -> Result<()> {
        let (server, lb) = (backend_address(0), &self.balancer);
        lb.ip_batch(&format!(
            "address add 10.0.1.1/24 dev l0\naddress add 10.0.2.1/24 dev k0\n\
             route add 10.0.0.0/8 dev l0\nneighbour replace {server} lladdr 02:00:00:00:02:0b dev k0\n"
        ))?;
        self.backend.ip_batch(&format!("address add {server}/24 dev b0\n"))?;
        // What is put on the other end of the pair only comes in here, without an XDP program, if segments may be joined.
        lb.output("ethtool", &["-K", "l0", "gro", "on"])?;
        // A later start must find its flows as they were, and none may be refused.
        let rules = format!(
            "table ip balance {{ chain in {{ type nat hook prerouting priority dstnat; \
             ip daddr {VIP} meta l4proto {{ tcp, udp }} th dport {VIP_PORT} dnat to {server}:{BACKEND_PORT}; }}; }}"
        );
        lb.output("nft", &[&rules]).context("load nftables' rules: is nftables installed?")?;
        self.restore.set(LIMIT, TRACKED)?;
        self.restore.set(BUCKETS, TRACKED)?;
        for (path, value) in [
            ("net/ipv4/ip_forward", "1"),
            ("net/netfilter/nf_conntrack_checksum", "0"),
            ("net/netfilter/nf_conntrack_udp_timeout", "3600"),
            ("net/netfilter/nf_conntrack_udp_timeout_stream", "3600"),
        ] {
            lb.set_sysctl(path, value)?;
        }
        let count = "table netdev count { chain in { type filter hook ingress device b0 priority 0; counter drop; }; }";
        self.backend.output("nft", &[count]).map(drop)
    }

    /// Makes and sends packets; how long it took until each had arrived.
    pub fn drive(
        &mut self,
        harness: &mut Harness,
        packets: &Packets,
        count: u32,
        end: Arrival,
    ) -> Result<Duration> {
        harness.make(packets)?;
        let before = self.arrived(harness, end)?;
        let start = Instant::now();
        let (device, length) = (self.client_device, packets.length as usize);
        self.client.run(|| harness.generate(count, length, device))?;
        let mut took = start.elapsed();
        let wanted = before + u64::from(count);
        if self.arrived(harness, end)? != wanted {
            // The last few, or some are lost.
            let arrived = eventually(PATIENCE, "the last packets", || {
                self.arrived(harness, end).ok().filter(|arrived| *arrived >= wanted)
            });
            took = start.elapsed();
            let now = self.arrived(harness, end)?;
            ensure!(
                arrived.is_ok() && now == wanted,
                "of {count} packets {} arrived: on a busy machine devices lose some",
                now - before
            );
        }
        Ok(took)
    }

    fn arrived(&self, harness: &Harness, end: Arrival) -> Result<u64> {
        if end == Arrival::Sink {
            return harness.seen();
        }
        let rules = self.backend.output("nft", &["list", "table", "netdev", "count"])?;
        let count = rules.split_once("counter packets ").and_then(|(_, rest)| rest.split(' ').next());
        count.and_then(|count| count.parse().ok()).context("read what came to the backend")
    }
}

/// Settings of the whole machine that go back to what they were.
#[derive(Default)]
struct Restore(Vec<(&'static str, String)>);

impl Restore {
    fn set(&mut self, path: &'static str, value: &str) -> Result<()> {
        let old = std::fs::read_to_string(path).with_context(|| format!("read {path}"))?;
        std::fs::write(path, value).with_context(|| format!("write {path}"))?;
        self.0.push((path, old));
        Ok(())
    }
}

impl Drop for Restore {
    fn drop(&mut self) {
        for (path, old) in &self.0 {
            if let Err(error) = std::fs::write(path, old.trim()) {
                eprintln!("could not set {path} back to {}: {error}", old.trim());
            }
        }
    }
}
