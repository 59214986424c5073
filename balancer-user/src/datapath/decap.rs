//! A backend's program, which unwraps what the balancer has wrapped.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, anyhow};
use aya::{
    Ebpf, EbpfLoader,
    maps::{
        HashMap, MapData,
        lpm_trie::{Key, LpmTrie},
    },
    programs::{Xdp, links::FdLink},
};
use balancer_common::{Address, Tunnelled, tunnel_names as names};

use super::{
    attachment::{AttachError, attach},
    batch::PerCpuArray,
    data,
    refusal::{explain_load, explain_program, require_net_admin},
    sums, take,
};

/// The program, compiled by `cargo xtask build`.
static OBJECT: &[u8] = aya::include_bytes_aligned!(env!("BALANCER_DECAP_OBJECT"));

/// The loaded program and its maps.
pub struct Decapsulator {
    ebpf: Ebpf,
    own: HashMap<MapData, Address, u32>,
    /// What is in `own`.
    addresses: BTreeSet<Address>,
    unwrapped: PerCpuArray<u64>,
}

impl Decapsulator {
    /// Loads it: `gue_port` is where GUE arrives, `trusted` are the networks that may send (addresses, and how many leading
    /// bits of 128 count).
    pub fn load(gue_port: u16, trusted: &[(Address, u8)]) -> Result<Decapsulator> {
        require_net_admin()?;
        let port = gue_port.to_be_bytes();
        let mut ebpf = EbpfLoader::new()
            .override_global(names::GUE_PORT, &port, true)
            .load(OBJECT)
            .map_err(explain_load)?;
        let mut networks: LpmTrie<_, Address, u32> = LpmTrie::try_from(take(&mut ebpf, names::TRUSTED)?)?;
        for (address, length) in trusted {
            networks
                .insert(&Key::new(u32::from(*length), *address), 1, 0)
                .context("write a network that may send")?;
        }
        program(&mut ebpf)?.load().map_err(explain_program)?;
        Ok(Decapsulator {
            own: HashMap::try_from(take(&mut ebpf, names::OWN)?)?,
            addresses: BTreeSet::new(),
            unwrapped: PerCpuArray::new(
                data(take(&mut ebpf, names::UNWRAPPED)?)?,
                Tunnelled::ALL.len() as u32,
            )?,
            ebpf,
        })
    }

    /// Attaches it to an interface that has no program; it goes with the value that is returned.
    pub fn attach(&mut self, ifindex: u32, is_generic: bool) -> Result<FdLink, AttachError> {
        attach(program(&mut self.ebpf).map_err(AttachError::Other)?, ifindex, is_generic)
    }

    /// Unwraps what is sent to these addresses from now on.
    pub fn set_addresses(&mut self, addresses: BTreeSet<Address>) -> Result<()> {
        for gone in self.addresses.difference(&addresses) {
            self.own.remove(gone).context("forget an address of this host")?;
        }
        for new in addresses.difference(&self.addresses) {
            self.own.insert(*new, 1, 0).context("write an address of this host")?;
        }
        self.addresses = addresses;
        Ok(())
    }

    /// How many packets it has had, in the order of `Tunnelled::ALL`.
    pub fn counts(&mut self) -> Result<[u64; Tunnelled::ALL.len()]> {
        sums(&mut self.unwrapped).context("read what was unwrapped")
    }
}

fn program(ebpf: &mut Ebpf) -> Result<&mut Xdp> {
    let program = ebpf.program_mut(names::PROGRAM);
    Ok(program.ok_or_else(|| anyhow!("the object file has no program `{}`", names::PROGRAM))?.try_into()?)
}
