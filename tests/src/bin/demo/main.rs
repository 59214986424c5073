//! `cargo xtask demo` runs this: a client, the balancer and its backends in network namespaces, under a real load.

mod load;
mod status;
mod table;

use std::{panic, process::ExitCode, sync::Arc, thread, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use balancer_tests::{
    Balancer, Plan,
    process::Place,
    topology::{VIP, backend_address},
};
use clap::{Parser, ValueEnum};

use load::{ECHO, HTTP, Load};
use status::Status;

/// A client, the balancer and its backends in network namespaces, under a real load.
#[derive(Parser)]
#[command(name = "cargo xtask demo", bin_name = "cargo xtask demo")]
pub struct Options {
    /// How the backend of a new flow is chosen
    #[arg(long, value_enum, default_value_t = Method::LeastPackets)]
    method: Method,
    /// How long to send load
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..=3600))]
    seconds: u16,
    /// The backends' weights: as many as there shall be backends
    #[arg(long, value_delimiter = ',', default_value = "2,3,4", value_parser = clap::value_parser!(u8).range(0..=100))]
    weights: Vec<u8>,
    /// Attach the XDP program in generic mode
    #[arg(long)]
    generic: bool,
}

/// The methods that the summary can judge.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Method {
    /// Fewest packets in the window
    LeastPackets,
    /// Fewest bytes in the window
    LeastBandwidth,
    /// In turn
    RoundRobin,
}

impl Method {
    /// The method's name in a configuration.
    fn name(self) -> &'static str {
        match self {
            Self::LeastPackets => "least-packets",
            Self::LeastBandwidth => "least-bandwidth",
            Self::RoundRobin => "round-robin",
        }
    }
}

fn main() -> ExitCode {
    match demonstrate(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn demonstrate(options: &Options) -> Result<()> {
    ensure!(options.weights.len() <= 16, "up to 16 backends");
    let backends = u8::try_from(options.weights.len()).context("count the backends")?;
    println!("demo: client, balancer and {backends} backends, each in a network namespace of its own");
    let bench = Plan::backends(backends).build()?;
    let place = Place::new()?;
    place.write_config(&config(options))?;
    println!("demo: the configuration is {}", place.config().display());
    let balancer = Balancer::start_in(place, &bench.balancer)?;
    let load = Arc::new(Load::new(options.weights.len()));
    let servers = load.serve(&bench)?;

    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("start tokio")?;
    let (watched, interrupted) = thread::scope(|scope| {
        let clients =
            scope.spawn(|| bench.client.run(|| load.drive(Duration::from_secs(options.seconds.into()))));
        let watched = runtime.block_on(watch(&balancer, &load));
        // Whatever ended the watch ends the load.
        load.stop();
        let clients = clients.join().unwrap_or_else(|panic| panic::resume_unwind(panic));
        (watched.and_then(|interrupted| clients.map(|()| interrupted)), load.is_interrupted())
    });
    servers.stop();
    let status = Status::read(&balancer);
    watched.with_context(|| format!("the balancer printed:\n{}", balancer.log()))?;
    if interrupted {
        bail!("interrupted");
    }
    table::summary(&status?, &load, options);
    load.verdict()
}

/// Shows the table once a second until the load or the user ends it.
async fn watch(balancer: &Balancer, load: &Load) -> Result<()> {
    let mut table = table::Live::new();
    let mut second = tokio::time::interval(Duration::from_secs(1));
    second.tick().await;
    loop {
        tokio::select! {
            _ = second.tick() => {}
            () = load.ended() => return Ok(()),
            interrupt = tokio::signal::ctrl_c() => {
                load.interrupt();
                return interrupt.context("wait for Ctrl-C");
            }
        }
        table.show(&Status::read(balancer)?, load);
    }
}

/// The configuration file, in full but for the paths that keep this demonstration apart from others.
fn config(options: &Options) -> String {
    let mode = if options.generic { "generic" } else { "auto" };
    let mut text = format!("[daemon]\ninterfaces = [\"lc\", \"lk\"]\nxdp-mode = \"{mode}\"\n");
    for service in [HTTP, ECHO] {
        text.push_str(&format!(
            "\n[[service]]\nname = \"{}\"\naddress = \"{VIP}:{}\"\nprotocol = \"{}\"\nmethod = \"{}\"\nforward = \"nat\"\n",
            service.name,
            service.port,
            service.protocol,
            options.method.name()
        ));
        for (number, weight) in (1..).zip(&options.weights) {
            text.push_str(&format!(
                "\n[[service.backend]]\nname = \"{}-{number}\"\naddress = \"{}:{}\"\nweight = {weight}\n",
                service.name,
                backend_address(number),
                service.backend_port
            ));
        }
    }
    text
}
