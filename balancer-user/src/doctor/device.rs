//! Whether an interface is fit for the program, natively or generically.

use super::{Finding, ethtool::Offloads, generic::XdpAbilities};
use crate::{config::XdpMode, network::Link};

/// Largest MTU whose packets fit into one buffer behind XDP's headroom, about: each driver has its own.
const ONE_BUFFER: u32 = 3500;

/// An interface, and what is known of it.
#[derive(Clone, Debug)]
pub struct Device {
    /// As the kernel's tables have it.
    pub link: Link,
    /// Whether somebody is at the other end.
    pub has_carrier: bool,
    /// What its driver says of itself.
    pub offloads: Offloads,
    /// What its driver can do for XDP; `None` = that is not known.
    pub abilities: Option<XdpAbilities>,
    /// Of a veth.
    pub far_end: Option<FarEnd>,
}

/// The other end of a veth.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FarEnd {
    /// Its name, in its own network namespace.
    pub name: String,
    /// Whether an XDP program is on it, natively.
    pub has_program: bool,
    /// Whether it leaves sums to the device; `None` = it can't be asked from here.
    pub tx_checksum: Option<bool>,
}

impl Device {
    /// What is found, for a program in this mode.
    pub fn judge(&self, mode: XdpMode) -> Vec<Finding> {
        let name = &self.link.name;
        if self.link.mac.is_none() {
            return vec![Finding::failure(
                name,
                "has no Ethernet address, so it can't carry balanced packets",
                "name the Ethernet interfaces that packets come in and leave by",
            )];
        }
        let refused = self.native_refusal();
        let native = match (&refused, mode) {
            (_, XdpMode::Generic) => Vec::new(),
            (None, _) if self.abilities.is_none() => vec![Finding::warning(
                name,
                format!("whether {} takes programs natively is not known before Linux 6.3", self.driver()),
                "`run` tries, and says in its log what came of it",
            )],
            (None, _) => vec![Finding::fine(name, format!("native XDP ({})", self.driver()))],
            (Some((what, advice)), XdpMode::Native) => {
                vec![Finding::failure(name, format!("native XDP will be refused: {what}"), advice)]
            }
            (Some((what, advice)), XdpMode::Auto) => vec![Finding::warning(
                name,
                format!(
                    "native XDP will be refused ({what}), so all interfaces run in generic mode, which is slower"
                ),
                advice,
            )],
        };
        let is_generic = mode == XdpMode::Generic || (mode == XdpMode::Auto && refused.is_some());
        let up = match (self.link.is_up, self.has_carrier) {
            (false, _) => Some(Finding::failure(
                name,
                "is down: nothing comes in or leaves by it",
                format!("`ip link set {name} up`"),
            )),
            (true, false) => Some(Finding::failure(
                name,
                "has no carrier: nothing comes in or leaves by it",
                "look at the cable, or at the other end",
            )),
            (true, true) => None,
        };
        let far_end = self.far_end(is_generic);
        up.into_iter()
            .chain(native)
            .chain(judge_offloads(name, &self.offloads, is_generic))
            .chain(far_end)
            .collect()
    }

    /// Whether the driver will not take the program.
    pub fn refuses_native(&self) -> bool {
        self.native_refusal().is_some()
    }

    fn driver(&self) -> &str {
        if self.offloads.driver.is_empty() { "an unknown driver" } else { &self.offloads.driver }
    }

    /// Why a program will not be taken natively, and what to do about it.
    fn native_refusal(&self) -> Option<(String, String)> {
        let abilities = self.abilities?;
        let (name, driver, mtu) = (&self.link.name, self.driver(), self.link.mtu);
        if !abilities.native && self.far_end.is_some() {
            return Some((
                format!("{driver} has fewer receiving queues than its other end has sending ones"),
                format!("`ethtool -L {name} rx N`, or `ethtool -L` with fewer `tx` at the other end"),
            ));
        }
        if !abilities.native {
            return Some((
                format!("{driver} has no native XDP"),
                "put the program on the device below it, where there is one".to_owned(),
            ));
        }
        if mtu > ONE_BUFFER && !abilities.many_buffers {
            return Some((
                format!(
                    "{driver} takes programs only while packets fit into one buffer, and the MTU is {mtu}"
                ),
                format!("`ip link set {name} mtu {ONE_BUFFER}` or less"),
            ));
        }
        None
    }

    /// What a veth needs of its other end.
    fn far_end(&self, is_generic: bool) -> Vec<Finding> {
        let name = &self.link.name;
        let mut findings = Vec::new();
        if let Some(abilities) = self.abilities
            && abilities.native
            && !abilities.redirect
            && !is_generic
        {
            findings.push(Finding::failure(
                name,
                "its driver can't send what a program redirects to another interface",
                "set xdp-mode = \"generic\", or take a NIC whose driver can",
            ));
        }
        if self.offloads.driver != "veth" {
            return findings;
        }
        let unseen = format!("the other end of {name}");
        let other = self.far_end.as_ref().map_or(&unseen, |end| &end.name);
        if !is_generic && self.far_end.as_ref().is_none_or(|end| !end.has_program) {
            let (what, advice) = (
                format!(
                    "frames that the program sends by it are lost unless {other} has an XDP program as well"
                ),
                format!("attach one that passes to {other}, or set xdp-mode = \"generic\""),
            );
            findings.push(match &self.far_end {
                Some(_) => Finding::failure(name, what, advice),
                None => Finding::warning(name, what, advice),
            });
        }
        let is_finished = self.far_end.as_ref().and_then(|end| end.tx_checksum).map(|is_left| !is_left);
        if is_finished != Some(true) {
            let (what, advice) = (
                format!(
                    "what programs at {other} send has sums that nobody has finished while its tx offload is on"
                ),
                format!(
                    "there: `ethtool -K {} tx off`",
                    self.far_end.as_ref().map_or("DEV", |end| &end.name)
                ),
            );
            findings.push(match is_finished {
                Some(_) => Finding::failure(name, what, advice),
                None => Finding::warning(name, what, advice),
            });
        }
        findings
    }
}

/// What drivers do to packets before the program sees them.
pub fn judge_offloads(name: &str, offloads: &Offloads, is_generic: bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    let joined: Vec<_> = [("gro", offloads.gro && is_generic), ("lro", offloads.lro)]
        .into_iter()
        .filter_map(|(offload, is_on)| is_on.then_some(offload))
        .collect();
    if !joined.is_empty() {
        let words: String = joined.iter().map(|offload| format!(" {offload} off")).collect();
        findings.push(Finding::warning(
            name,
            format!(
                "{} joins segments: they count as one packet, and may be too big to go on",
                joined.join(" and ")
            ),
            format!("`ethtool -K {name}{words}`"),
        ));
    }
    if offloads.rxvlan {
        findings.push(Finding::warning(
            name,
            "rxvlan takes VLAN tags off frames before XDP sees them: such a frame is taken for an untagged one",
            format!("where tagged frames come in: `ethtool -K {name} rxvlan off`"),
        ));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Level;

    const ALL: XdpAbilities = XdpAbilities { native: true, redirect: true, many_buffers: true };

    fn device() -> Device {
        Device {
            link: Link {
                index: 5,
                name: "eth0".to_owned(),
                mac: Some([2, 0, 0, 0, 0, 1]),
                mtu: 1500,
                is_up: true,
                xdp: None,
                vlan: None,
            },
            has_carrier: true,
            offloads: Offloads { driver: "mlx5_core".to_owned(), gro: true, ..Offloads::default() },
            abilities: Some(ALL),
            far_end: None,
        }
    }

    fn veth() -> Device {
        let end = FarEnd { name: "c0".to_owned(), has_program: true, tx_checksum: Some(false) };
        let offloads = Offloads { driver: "veth".to_owned(), ..Offloads::default() };
        Device { offloads, far_end: Some(end), ..device() }
    }

    /// A device, the mode, and what is wrong: each with its level and a part of its text.
    #[test]
    fn each_fault_of_a_device_is_found_alone() {
        use Level::{Failure, Warning};
        use XdpMode::{Auto, Generic, Native};
        let with = |change: &dyn Fn(&mut Device), mut device: Device| {
            change(&mut device);
            device
        };
        let abilities = |abilities| with(&|device| device.abilities = abilities, device());
        let none = XdpAbilities { native: false, redirect: false, many_buffers: false };
        let far = |change: &dyn Fn(&mut FarEnd)| with(&|d| d.far_end.iter_mut().for_each(change), veth());
        let rows = [
            (device(), Auto, None),
            (device(), Native, None),
            (device(), Generic, Some((Warning, "gro joins segments"))),
            (with(&|d| d.offloads.lro = true, device()), Auto, Some((Warning, "lro joins segments"))),
            (
                with(&|d| d.offloads.rxvlan = true, device()),
                Auto,
                Some((Warning, "rxvlan takes VLAN tags off")),
            ),
            (with(&|d| d.link.mac = None, device()), Auto, Some((Failure, "no Ethernet address"))),
            (with(&|d| d.link.is_up = false, device()), Auto, Some((Failure, "is down"))),
            (with(&|d| d.has_carrier = false, device()), Auto, Some((Failure, "has no carrier"))),
            (abilities(None), Auto, Some((Warning, "not known before Linux 6.3"))),
            (
                abilities(Some(XdpAbilities { redirect: false, ..ALL })),
                Auto,
                Some((Failure, "can't send what")),
            ),
            (abilities(Some(none)), Native, Some((Failure, "mlx5_core has no native XDP"))),
            (
                with(&|d| d.offloads.gro = false, abilities(Some(none))),
                Auto,
                Some((Warning, "no native XDP")),
            ),
            (
                with(&|d| d.link.mtu = 9000, abilities(Some(XdpAbilities { many_buffers: false, ..ALL }))),
                Native,
                Some((Failure, "the MTU is 9000")),
            ),
            (with(&|d| d.link.mtu = 9000, device()), Native, None),
            (veth(), Auto, None),
            (with(&|d| d.abilities = Some(none), veth()), Auto, Some((Warning, "fewer receiving queues"))),
            (far(&|end| end.has_program = false), Auto, Some((Failure, "lost unless c0 has an XDP program"))),
            (far(&|end| end.has_program = false), Generic, None),
            (
                far(&|end| end.tx_checksum = Some(true)),
                Auto,
                Some((Failure, "sums that nobody has finished")),
            ),
            (far(&|end| end.tx_checksum = None), Generic, Some((Warning, "sums that nobody has finished"))),
        ];
        for (row, (device, mode, expected)) in rows.into_iter().enumerate() {
            let found: Vec<_> =
                device.judge(mode).into_iter().filter(|finding| finding.level != Level::Fine).collect();
            match (&found[..], expected) {
                ([], None) => {}
                ([finding], Some((level, part))) if finding.level == level && finding.what.contains(part) => {
                    assert_eq!(finding.about, "eth0");
                    assert!(!finding.advice.is_empty());
                }
                _ => panic!("row {row}: {found:?}"),
            }
        }
    }

    #[test]
    fn an_end_that_is_not_seen_is_warned_of() {
        let device = Device { far_end: None, ..veth() };
        let found = device.judge(XdpMode::Auto);
        let levels: Vec<_> = found.iter().map(|finding| finding.level).collect();
        assert_eq!(levels, [Level::Fine, Level::Warning, Level::Warning], "{found:?}");
        assert_eq!(found[2].advice, "there: `ethtool -K DEV tx off`");
    }
}
