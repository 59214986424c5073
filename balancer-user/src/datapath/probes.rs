//! The programs by which health checks go the way of a service's packets.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, anyhow};
use aya::{
    Ebpf,
    maps::{Array, MapData},
    programs::{
        LinkOrder, SchedClassifier, TcAttachType,
        tc::{SchedClassifierLink, TcAttachOptions},
    },
    util::KernelVersion,
};
use balancer_common::{BackendId, ProbeWay, probe_names as names};
use bytemuck::Zeroable as _;

use super::{
    refusal::{explain_load, explain_program},
    take,
};

/// The programs, compiled by `cargo xtask build`.
static OBJECT: &[u8] = aya::include_bytes_aligned!(env!("BALANCER_PROBE_OBJECT"));

/// Whether this kernel can attach them (TCX, Linux 6.6).
pub fn can_turn_probes() -> bool {
    KernelVersion::current().is_ok_and(|version| version >= KernelVersion::new(6, 6, 0))
}

/// The loaded programs, which go with this value.
pub struct ProbePath {
    ebpf: Ebpf,
    ways: Array<MapData, [u8; size_of::<ProbeWay>()]>,
    /// As they are in the map.
    written: BTreeMap<BackendId, ProbeWay>,
    /// By the interface's index.
    links: BTreeMap<u32, [SchedClassifierLink; 2]>,
}

impl ProbePath {
    /// Loads them; nothing is attached.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn load() -> Result<ProbePath> {
        let mut ebpf = Ebpf::load(OBJECT).map_err(explain_load)?;
        for name in [names::OUT, names::IN] {
            program(&mut ebpf, name)?.load().map_err(explain_program)?;
        }
        let ways = Array::try_from(take(&mut ebpf, names::WAYS)?)?;
        Ok(ProbePath { ebpf, ways, written: BTreeMap::new(), links: BTreeMap::new() })
    }

    /// Has the checks of these backends go these ways, and no others.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn set_ways(&mut self, ways: BTreeMap<BackendId, ProbeWay>) -> Result<()> {
        let zero = ProbeWay::zeroed();
        let gone: Vec<_> =
            self.written.keys().filter(|id| !ways.contains_key(id)).map(|id| (*id, zero)).collect();
        let new = ways.iter().filter(|(id, way)| self.written.get(id) != Some(way));
        for (id, way) in gone.into_iter().chain(new.map(|(id, way)| (*id, *way))) {
            self.ways
                .set(u32::from(id), bytemuck::cast::<_, [u8; size_of::<ProbeWay>()]>(way), 0)
                .context("write the way of a health check")?;
        }
        self.written = ways;
        Ok(())
    }

    /// Has checks leave by these interfaces, by index and name; those that are gone are forgotten. Without any way to turn
    /// checks to, by none.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn set_interfaces(&mut self, interfaces: &[(u32, &str)]) -> Result<()> {
        let wanted = if self.written.is_empty() { &[] } else { interfaces };
        self.links.retain(|index, _| wanted.iter().any(|(wanted, _)| wanted == index));
        for (index, name) in wanted {
            if !self.links.contains_key(index) {
                let links = [
                    self.attach(names::OUT, name, TcAttachType::Egress)?,
                    self.attach(names::IN, name, TcAttachType::Ingress)?,
                ];
                self.links.insert(*index, links);
            }
        }
        Ok(())
    }

    fn attach(
        &mut self,
        program_name: &str,
        interface: &str,
        to: TcAttachType,
    ) -> Result<SchedClassifierLink> {
        let program = program(&mut self.ebpf, program_name)?;
        let what = || format!("attach {program_name} to {interface}");
        let link = program
            .attach_with_options(interface, to, TcAttachOptions::TcxOrder(LinkOrder::last()))
            .with_context(what)?;
        program.take_link(link).with_context(what)
    }
}

fn program<'a>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut SchedClassifier> {
    let program = ebpf.program_mut(name);
    Ok(program.ok_or_else(|| anyhow!("the object file has no program `{name}`"))?.try_into()?)
}
