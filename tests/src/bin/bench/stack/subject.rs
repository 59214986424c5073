//! The servers, and what stands before them.

use std::{env, fs, path::Path};

use anyhow::{Context as _, Result};
use balancer_tests::{
    Balancer, Netns, Plan, Process, Topology,
    config::{self, Service},
    cpu,
    echo::Echo,
    nginx::Nginx,
    topology::{BALANCER_CLIENT_SIDE, VIP, backend_address},
};
use tempfile::TempDir;

/// Ports of the service, in the order of `PORTS_BEHIND`: web, throughput, datagrams.
pub const PORTS: [u16; 3] = [80, 5201, 90];
/// The same of the servers.
pub const PORTS_BEHIND: [u16; 3] = [8080, 5201, 9000];
/// What nginx needs to pass connections on.
const STREAM: &str = "/usr/lib/nginx/modules/ngx_stream_module.so";

/// The way to the servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    /// Routed by the kernel, to one of them.
    Direct,
    Balancer,
    Nftables,
    Haproxy,
    Nginx,
}

impl Subject {
    pub const ALL: [Subject; 5] =
        [Subject::Direct, Subject::Balancer, Subject::Nftables, Subject::Haproxy, Subject::Nginx];

    pub const fn name(self) -> &'static str {
        match self {
            Subject::Direct => "directly",
            Subject::Balancer => "balancer",
            Subject::Nftables => "nftables DNAT",
            Subject::Haproxy => "HAProxy, TCP mode",
            Subject::Nginx => "nginx, stream",
        }
    }

    /// What is not installed that it needs.
    pub fn missing(self) -> Option<&'static str> {
        let tool = match self {
            Subject::Direct => return None,
            Subject::Balancer => {
                return env::var_os("BALANCER_BIN")
                    .is_none()
                    .then_some("the balancer's binary (BALANCER_BIN)");
            }
            Subject::Nginx => {
                return (!Path::new(STREAM).exists())
                    .then_some("nginx's stream module (libnginx-mod-stream)");
            }
            Subject::Nftables => "nft",
            Subject::Haproxy => "haproxy",
        };
        let path = env::var_os("PATH").unwrap_or_default();
        let mut places = env::split_paths(&path).chain(["/usr/sbin".into()]);
        (!places.any(|place| place.join(tool).exists())).then_some(tool)
    }

    /// Whether its connections are measured until it is known well what they take.
    pub const fn is_compared(self) -> bool {
        matches!(self, Subject::Direct | Subject::Balancer | Subject::Nftables)
    }

    pub fn carries_datagrams(self) -> bool {
        self != Subject::Haproxy
    }
}

/// Servers behind the balancer's namespace, and a client before it.
pub struct Servers {
    _echo: Echo,
    _throughput: Process,
    _web: Vec<Nginx>,
    pub bench: Topology,
    directory: TempDir,
    /// Of proxies.
    cpu: usize,
}

/// What stands before the servers, until it is dropped.
pub enum Running<'a> {
    Nothing,
    Rules(&'a Netns),
    Proxy { _process: Process },
    Balancer { _daemon: Box<Balancer> },
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if let Running::Rules(netns) = self
            && let Err(error) = netns.output("nft", &["delete table ip stack"])
        {
            eprintln!("could not take nftables' rules out: {error:#}");
        }
    }
}

impl Servers {
    pub fn start() -> Result<Servers> {
        let bench = Plan { forwarding: true, ..Plan::backends(2) }.build()?;
        let lb = &bench.balancer;
        bench.client.ip(&format!("route add 10.0.2.0/24 via {BALANCER_CLIENT_SIDE}"))?;
        // Local for the proxies; the others take packets before the kernel looks.
        lb.ip(&format!("address add {VIP}/32 dev lo"))?;
        for device in ["lc", "lk"] {
            lb.output("ethtool", &["-K", device, "tx", "off", "tso", "off", "gso", "off", "gro", "off"])?;
        }
        // A client's ports come round within seconds.
        for netns in [&bench.client, lb] {
            netns.set_sysctl("net/ipv4/tcp_tw_reuse", "1")?;
            netns.set_sysctl("net/ipv4/ip_local_port_range", "1024 60999")?;
        }
        let mut web = Vec::new();
        for (number, backend) in (1..).zip(&bench.backends) {
            web.push(Nginx::start(backend, (backend_address(number), PORTS_BEHIND[0]), "server")?);
        }
        let first = bench.backend(1)?;
        let mut command = first.command("iperf3");
        let throughput = Process::spawn(command.args(["-s", "-p", &PORTS_BEHIND[1].to_string()]))?;
        let echo = Echo::udp(first, (backend_address(1), PORTS_BEHIND[2]))?;
        let directory = TempDir::with_prefix("balancer-bench-").context("make a directory")?;
        let cpu = cpu::online()? - 1;
        Ok(Servers { _echo: echo, _throughput: throughput, _web: web, bench, directory, cpu })
    }

    /// Puts something before the servers.
    pub fn put(&self, subject: Subject) -> Result<Running<'_>> {
        let lb = &self.bench.balancer;
        let [one, two] = [1, 2].map(backend_address);
        let [web, throughput, datagrams] = PORTS;
        let [web_behind, throughput_behind, datagrams_behind] = PORTS_BEHIND;
        Ok(match subject {
            Subject::Direct => Running::Nothing,
            Subject::Nftables => {
                lb.output("nft", &[&format!(
                    "table ip stack {{ chain in {{ type nat hook prerouting priority dstnat; \
                     ip daddr {VIP} tcp dport {web} dnat to numgen inc mod 2 map {{ 0 : {one}, 1 : {two} }}:{web_behind}; \
                     ip daddr {VIP} tcp dport {throughput} dnat to {one}:{throughput_behind}; \
                     ip daddr {VIP} udp dport {datagrams} dnat to {one}:{datagrams_behind}; }}; }}"
                )])?;
                Running::Rules(lb)
            }
            Subject::Haproxy => self.proxy("haproxy", &["-db", "-f"], &format!(
                "global\n nbthread 1\ndefaults\n mode tcp\n timeout connect 5s\n timeout client 1m\n timeout server 1m\n\
                 listen web\n bind {VIP}:{web}\n server b1 {one}:{web_behind}\n server b2 {two}:{web_behind}\n\
                 listen throughput\n bind {VIP}:{throughput}\n server b1 {one}:{throughput_behind}\n"
            ))?,
            Subject::Nginx => self.proxy("nginx", &["-c"], &format!(
                "load_module {STREAM}; daemon off; master_process off; worker_processes 1; pid {}/pid; error_log stderr;
                 events {{ worker_connections 4096; }}
                 stream {{
                     upstream web {{ server {one}:{web_behind}; server {two}:{web_behind}; }}
                     server {{ listen {VIP}:{web}; proxy_pass web; }}
                     server {{ listen {VIP}:{throughput}; proxy_pass {one}:{throughput_behind}; }}
                     server {{ listen {VIP}:{datagrams} udp; proxy_pass {one}:{datagrams_behind}; proxy_timeout 2s; }}
                 }}",
                self.directory.path().display()
            ))?,
            Subject::Balancer => {
                let service = |name: &str, protocol, port: u16, behind: u16, count: usize| Service {
                    name: name.to_owned(),
                    address: (VIP, port).into(),
                    backends: [one, two][..count].iter().map(|address| ((*address, behind).into(), 1)).collect(),
                    ..Service::new(protocol, "least-packets", &[])
                };
                let services = [
                    service("web", "tcp", web, web_behind, 2),
                    service("throughput", "tcp", throughput, throughput_behind, 1),
                    service("datagrams", "udp", datagrams, datagrams_behind, 1),
                ];
                Running::Balancer { _daemon: Box::new(Balancer::start(lb, &config::text("", &services))?) }
            }
        })
    }

    fn proxy(&self, program: &str, arguments: &[&str], config: &str) -> Result<Running<'_>> {
        let file = self.directory.path().join(program);
        fs::write(&file, config).with_context(|| format!("write {program}'s configuration"))?;
        let mut command = self.bench.balancer.command("taskset");
        command.args(["-c", &self.cpu.to_string(), program]).args(arguments).arg(&file);
        Ok(Running::Proxy { _process: Process::spawn(&mut command)? })
    }
}
