//! Reads what is judged from this host. Attaches nothing and changes nothing.

use std::{fs, net::IpAddr, path::Path};

use anyhow::Result;

use super::{
    Finding,
    backend::{Facts, Place, Serving, Tunnel, Verdict, Wire},
    configured,
    device::{Device, FarEnd, judge_offloads},
    ethtool::Offloads,
    forwarding::without_forwarding,
    generic::{gue_ports, xdp_abilities},
    ports::shared_ports,
};
use crate::{
    attach::occupant,
    capabilities,
    config::{Config, DEFAULT_PIN_PATH, Forward, InterfaceName, XdpMode},
    controller::cannot_probe,
    datapath::{PinnedLinks, program_name},
    instance::require_bpffs,
    netlink::{Detail, Netlink, Taken},
    network::{Link, Network},
};

/// What the host has to offer a balancer: on these interfaces, or without any on all that are up; and what `config` needs
/// beyond. Whether the program can be loaded is for the caller to try.
///
/// # Errors
///
/// When the kernel does not answer.
pub async fn balancer(names: &[InterfaceName], config: Option<(&Config, &Network)>) -> Result<Vec<Finding>> {
    let netlink = Netlink::open()?;
    let network = netlink.read(&[]).await?;
    let mode = config.map_or(XdpMode::Auto, |(config, _)| config.daemon.xdp_mode);
    let default = Path::new(DEFAULT_PIN_PATH);
    let pins = config.map_or(Some(default), |(config, _)| config.daemon.pin_path.as_deref());
    let mut findings: Vec<_> = pins.into_iter().map(pin_path).collect();
    let configured = config.map_or(&[][..], |(config, _)| &config.daemon.interfaces);
    let names: Vec<&str> = match (names, configured) {
        ([], []) => network
            .links
            .iter()
            .filter(|link| link.mac.is_some() && link.is_up && !is_loopback(link))
            .map(|link| link.name.as_str())
            .collect(),
        ([], names) | (names, _) => names.iter().map(InterfaceName::as_str).collect(),
    };
    let details = netlink.details().await?;
    let pinned = pins.and_then(|pins| PinnedLinks::read(pins).ok()).unwrap_or_default();
    let is_optional = |name: &str| {
        config.is_some_and(|(config, _)| {
            config.daemon.optional.iter().any(|optional| optional.as_str() == name)
        })
    };
    let mut devices = Vec::new();
    for name in names {
        let Some(link) = network.link(name) else {
            let others: Vec<&str> = network.links.iter().map(|link| link.name.as_str()).collect();
            let advice = format!("there are: {}", others.join(", "));
            findings.push(match is_optional(name) {
                true => Finding::warning(name, "there is no such interface yet", advice),
                false => Finding::failure(name, "there is no such interface", advice),
            });
            continue;
        };
        match occupant(link, &pinned) {
            Ok(None) => {}
            Ok(Some(_)) => findings.push(Finding::fine(name, "carries this balancer's program")),
            Err(error) => findings.push(Finding::failure(name, error.what, error.advice)),
        }
        devices.push(device(link, &details));
    }
    // One mode for all, so that one that can't take the program natively decides for the others.
    let is_refused = mode == XdpMode::Auto && devices.iter().any(Device::refuses_native);
    for device in devices {
        let mode = if is_refused && !device.refuses_native() { XdpMode::Generic } else { mode };
        findings.extend(device.judge(mode));
    }
    if let Some((config, network)) = config {
        findings.extend(shared_ports(config.services.iter()));
        findings.extend(without_forwarding(&config.daemon, config.services.iter()));
        findings.extend(cannot_probe(config).map(|why| Finding::failure("health", why, "")));
        findings.extend(raw_sockets(config));
        findings.extend(configured::judge(config, network));
    }
    Ok(findings)
}

/// What drivers do to packets on an interface before the program sees them.
pub fn offloads(name: &str, is_generic: bool) -> Vec<Finding> {
    judge_offloads(name, &Offloads::read(name), is_generic)
}

/// What a backend has to offer, on these interfaces, or without any on all Ethernet interfaces that are up.
///
/// # Errors
///
/// When the kernel does not answer, or there is no such interface.
pub async fn backend(serving: &Serving, names: &[InterfaceName]) -> Result<Vec<Finding>> {
    let netlink = Netlink::open()?;
    let network = netlink.read(&[serving.client]).await?;
    let details = netlink.details().await?;
    let kind = |link: &Link| {
        details.iter().find(|detail| detail.index == link.index).map(|detail| detail.kind.as_str())
    };
    let mut findings = Vec::new();
    for name in names.iter().filter(|name| network.link(name.as_str()).is_none_or(|link| !link.is_up)) {
        findings.push(Finding::failure(
            name.as_str(),
            "there is no such interface, or it is down",
            "see `ip link`",
        ));
    }
    let is_asked = |link: &&Link| names.is_empty() || names.iter().any(|name| name.as_str() == link.name);
    let is_wire = |link: &&Link| is_ethernet(link) && link.is_up;
    let mut facts = Facts {
        places: places(serving.service, &network),
        wires: Vec::new(),
        tunnels: Vec::new(),
        has_gue_port: gue_ports().iter().any(|gue| gue.port == serving.gue_port),
        way_back: network.routes.get(&serving.client).and_then(|route| {
            let link = network.links.iter().find(|link| link.index == route.ifindex);
            link.map(|link| link.name.clone())
        }),
    };
    for link in network.links.iter().filter(is_wire).filter(is_asked) {
        facts.wires.push(Wire {
            name: link.name.clone(),
            mtu: link.mtu,
            unwraps: link
                .xdp
                .and_then(|xdp| program_name(xdp.program))
                .is_some_and(|name| name == balancer_common::tunnel_names::PROGRAM),
            arp_ignore: ipv4_effective(&link.name, "arp_ignore"),
            arp_announce: ipv4_effective(&link.name, "arp_announce"),
            verdict: verdict(&netlink, serving, link).await,
        });
    }
    let wanted: &[&str] = if serving.service.is_ipv4() { &["ipip", "ip6tnl"] } else { &["sit", "ip6tnl"] };
    let is_tunnel = |link: &&Link| link.is_up && kind(link).is_some_and(|kind| wanted.contains(&kind));
    for link in network.links.iter().filter(is_tunnel) {
        facts
            .tunnels
            .push(Tunnel { name: link.name.clone(), verdict: verdict(&netlink, serving, link).await });
    }
    findings.extend(serving.judge(&facts));
    Ok(findings)
}

async fn verdict(netlink: &Netlink, serving: &Serving, link: &Link) -> Verdict {
    match netlink.taken(serving.client, serving.service, link.index).await {
        Taken::In => Verdict::Local,
        Taken::Refused if ipv4_effective(&link.name, "rp_filter") > 0 => Verdict::Filtered,
        Taken::Refused => Verdict::Lost("the kernel refuses its source".to_owned()),
        Taken::NotIn(why) => Verdict::Lost(why),
    }
}

fn places(address: IpAddr, network: &Network) -> Vec<Place> {
    let of_it = network.addresses.iter().filter(|local| local.address == address);
    of_it
        .filter_map(|local| {
            let link = network.links.iter().find(|link| link.index == local.ifindex)?;
            Some(Place { interface: link.name.clone(), prefix: local.prefix, is_ethernet: is_ethernet(link) })
        })
        .collect()
}

fn is_loopback(link: &Link) -> bool {
    link.mac.is_none_or(|mac| mac == [0; 6])
}

fn is_ethernet(link: &Link) -> bool {
    !is_loopback(link)
}

/// A setting as it holds for an interface: the larger of its own and that of all.
fn ipv4_effective(interface: &str, setting: &str) -> u8 {
    ipv4_setting("all", setting).max(ipv4_setting(interface, setting))
}

/// 0 where it can't be read.
fn ipv4_setting(interface: &str, setting: &str) -> u8 {
    let path = format!("/proc/sys/net/ipv4/conf/{interface}/{setting}");
    fs::read_to_string(path).ok().and_then(|value| value.trim().parse().ok()).unwrap_or(0)
}

fn pin_path(pins: &Path) -> Finding {
    let about = "pin-path";
    match require_bpffs(pins) {
        Ok(()) => Finding::fine(about, format!("{} is on a BPF file system", pins.display())),
        Err(error) => Finding::failure(about, format!("{error:#}"), ""),
    }
}

fn raw_sockets(config: &Config) -> Option<Finding> {
    let needs = |service: &crate::config::Service| {
        service.advertise || service.backends.iter().any(|backend| backend.checks(service).is_some())
    };
    let service = config.services.iter().find(|service| needs(service))?;
    (!capabilities::holds_net_raw()).then(|| {
        Finding::warning(
            "CAP_NET_RAW",
            format!(
                "is missing: service {} can't be announced, or not be checked by every kind of probe",
                service.name
            ),
            "run as root, or add CAP_NET_RAW",
        )
    })
}

fn device(link: &Link, details: &[Detail]) -> Device {
    let detail = details.iter().find(|detail| detail.index == link.index);
    let far_end = detail.and_then(|detail| detail.far_end.clone()).map(|end| FarEnd {
        has_program: end.has_native_program,
        tx_checksum: end.is_here.then(|| Offloads::read(&end.name).tx_checksum),
        name: end.name,
    });
    Device {
        link: link.clone(),
        has_carrier: detail.is_some_and(|detail| detail.has_carrier),
        offloads: Offloads::read(&link.name),
        abilities: xdp_abilities(link.index),
        far_end,
    }
}

/// The ways in which packets come to backends that hold the service's address.
pub const WAYS: [Forward; 3] = [Forward::Dsr, Forward::Ipip, Forward::Gue];
