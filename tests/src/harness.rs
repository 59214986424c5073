//! The programs that measure from within the kernel (`tests/harness`), loaded and run.

use std::{env, fs, path::PathBuf};

use anyhow::{Context as _, Result, ensure};
use aya::{
    Ebpf,
    maps::{Array, DevMap, MapData, PerCpuArray, ProgramArray},
    programs::{
        TestRun as _, TestRunAttrs, TestRunOptions, Xdp,
        xdp::{XdpLink, XdpMode},
    },
};
use balancer_harness::{Packets, names};

use crate::program::INGRESS;

/// Packets × this many bytes: what an array of `Packets` holds, in aya's eyes.
const SIZE: usize = size_of::<Packets>();

/// All programs that the harness has.
const PROGRAMS: [&str; 5] = [names::HARNESS, names::GENERATOR, names::SINK, names::FLOOR, names::LIMIT];
/// Frames that the generator makes in one go, as a NIC's driver takes them in.
const BATCH: u32 = 64;

/// The harness, with the programs that it compares others with.
pub struct Harness {
    ebpf: Ebpf,
    packets: Array<MapData, [u8; SIZE]>,
    under_test: ProgramArray<MapData>,
    out: DevMap<MapData>,
    seen: PerCpuArray<MapData, u64>,
}

/// A program to be measured.
pub enum Subject<'a> {
    /// One of the harness's own, by its name.
    Own(&'static str),
    /// Another one, loaded.
    Loaded(&'a Xdp),
}

/// What came of the last packet.
pub struct Last {
    /// The verdict.
    pub verdict: u32,
    /// The frame as it left.
    pub frame: Vec<u8>,
}

impl Harness {
    /// Loads the object file that `cargo xtask` has built: `BALANCER_HARNESS_OBJECT`.
    pub fn load() -> Result<Harness> {
        let path = env::var_os("BALANCER_HARNESS_OBJECT").map(PathBuf::from);
        let path = path.context("BALANCER_HARNESS_OBJECT is not set: use `cargo xtask bench` or `test`")?;
        let object = fs::read(&path).with_context(|| format!("read the harness {}", path.display()))?;
        let mut ebpf = Ebpf::load(&object)
            .context("load the harness (needs root, or CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN)")?;
        for name in PROGRAMS {
            let program: &mut Xdp = ebpf.program_mut(name).with_context(|| missing(name))?.try_into()?;
            program.load().with_context(|| format!("load the harness's program {name}"))?;
        }
        let mut take = |name| ebpf.take_map(name).with_context(|| missing(name));
        let packets = Array::try_from(take(names::PACKETS)?)?;
        let under_test = ProgramArray::try_from(take(names::UNDER_TEST)?)?;
        let out = DevMap::try_from(take(names::OUT)?)?;
        let seen = PerCpuArray::try_from(take(names::SEEN)?)?;
        Ok(Harness { ebpf, packets, under_test, out, seen })
    }

    /// Says which packets come next, from their first.
    pub fn make(&mut self, packets: &Packets) -> Result<()> {
        self.packets.set(0, bytemuck::cast::<_, [u8; SIZE]>(*packets), 0).context("describe the packets")
    }

    /// Says which program gets them.
    pub fn call(&mut self, subject: &Subject<'_>) -> Result<()> {
        let program = match subject {
            Subject::Own(name) => self.program(name)?.fd()?,
            Subject::Loaded(program) => program.fd()?,
        };
        let descriptor = program.try_clone().context("clone a program's descriptor")?;
        self.under_test.set(0, &descriptor, 0).context("put a program under test")
    }

    /// Makes `count` packets of `length` bytes, and has each processed; what a packet took, in nanoseconds. The kernel rounds
    /// them down: half of one is added, which it takes off on the average.
    pub fn run(&self, count: u32, length: usize) -> Result<(f64, Last)> {
        let frame = vec![0; length];
        // struct xdp_md: data, data_end, data_meta, ingress_ifindex, rx_queue_index, egress_ifindex.
        let context: [u32; 6] = [0, length as u32, 0, INGRESS, 0, 0];
        let mut output = vec![0; length + 256];
        let result = self
            .program(names::HARNESS)?
            .test_run(TestRunOptions {
                data_in: Some(&frame),
                data_out: Some(&mut output),
                ctx_in: Some(bytemuck::bytes_of(&context)),
                repeat: count,
                ..TestRunOptions::default()
            })
            .context("run the harness")?;
        ensure!(result.return_value != 0, "the harness could not make its packets, or has nothing to call");
        output.truncate(result.data_size_out as usize);
        let last = Last { verdict: result.return_value, frame: output };
        Ok((result.duration.as_nanos() as f64 + 0.5, last))
    }

    /// Attaches one of the harness's programs to a device of the caller's namespace, in native mode, until what is
    /// returned is dropped.
    pub fn attach(&mut self, name: &str, device: u32) -> Result<XdpLink> {
        let program: &mut Xdp = self.ebpf.program_mut(name).with_context(|| missing(name))?.try_into()?;
        let link = program.attach_to_if_index(device, XdpMode::Driver);
        let link = link.with_context(|| format!("attach the harness's program {name}"))?;
        program.take_link(link).context("keep a link")
    }

    /// Says by which device of the caller's namespace the generator sends.
    pub fn send_by(&mut self, device: u32) -> Result<()> {
        self.out.set(0, device, None, 0).context("say where the generator sends")
    }

    /// Makes and sends `count` frames of `length` bytes (Linux 5.18), in the namespace of the device that they leave by.
    pub fn generate(&self, count: u32, length: usize, device: u32) -> Result<()> {
        let frame = vec![0; length];
        let context: [u32; 6] = [0, length as u32, 0, device, 0, 0];
        let options = TestRunOptions {
            data_in: Some(&frame),
            ctx_in: Some(bytemuck::bytes_of(&context)),
            repeat: count,
            attrs: TestRunAttrs::new().xdp_live_frames(BATCH),
            ..TestRunOptions::default()
        };
        self.program(names::GENERATOR)?.test_run(options).context("run the generator")?;
        Ok(())
    }

    /// How many packets the sink has seen.
    pub fn seen(&self) -> Result<u64> {
        Ok(self.seen.get(&0, 0).context("read what the sink has seen")?.iter().sum())
    }

    fn program(&self, name: &str) -> Result<&Xdp> {
        Ok(self.ebpf.program(name).with_context(|| missing(name))?.try_into()?)
    }
}

fn missing(name: &str) -> String {
    format!("the harness has no {name}")
}
