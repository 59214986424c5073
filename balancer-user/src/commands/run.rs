//! `balancer run`: from the configuration to the program on its interfaces, and the loop that steers it.

use std::{io::IsTerminal as _, net::IpAddr, path::PathBuf, process::ExitCode, sync::Arc, time::Duration};

use anyhow::{Context as _, Result, anyhow, bail};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{mpsc, watch},
    task::yield_now,
    time::{MissedTickBehavior, interval},
};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;

use crate::{
    announce::Announcer,
    api::{self, AttachedMode, Command, Published, Server},
    attach::{self, Attachments, Interfaces},
    capabilities,
    cli::RunArgs,
    clock::Monotonic,
    config::{Config, Name, PassiveHealth},
    controller::{Controller, Prepared, cannot_probe},
    datapath::{Datapath, ProbePath, Sizes, remove_pinned_maps},
    doctor,
    health::{Prober, Report},
    instance::Instance,
    netlink::Netlink,
    network::{Link, Network},
    path_mtu::{self, Told},
    pin_watch::PinWatch,
    profile::Profile,
    supervisor::Supervisor,
};

/// How long the start waits for the backends' link-layer addresses.
const NEIGHBOURS_AT_START: Duration = Duration::from_millis(500);
/// Most reports of health checks that are heard at once.
const REPORTS: usize = 256;
/// Up to which age it is known when a flow was opened, at least: until a walk over the flow table has seen whether it was
/// answered.
const KNOWN_AGE: Duration = PassiveHealth::LONGEST_TIMEOUT.saturating_add(Duration::from_secs(3));
/// The least time between two publications of the status.
const STATUS_PERIOD: Duration = Duration::from_millis(200);

/// Runs the balancer until SIGINT or SIGTERM.
pub fn run(arguments: &RunArgs) -> Result<ExitCode> {
    let (text, config) = Config::read(&arguments.config)?;
    if let Some(why) = cannot_probe(&config) {
        bail!("{why}");
    }
    start_log()?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("start the event loop")?;
    runtime.block_on(balance(config, text, arguments))?;
    Ok(ExitCode::SUCCESS)
}

/// Log lines go to stderr, those of the XDP program (target `balancer_program`) among them; `RUST_LOG` sets what is
/// logged, `info` unless set.
pub(super) fn start_log() -> Result<()> {
    let filter = EnvFilter::builder().with_default_directive(LevelFilter::INFO.into()).from_env_lossy();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .try_init()
        .map_err(|error| anyhow!("start logging: {error}"))?;
    tracing_log::LogTracer::init().context("join the program's log lines to the log")
}

async fn balance(config: Config, text: String, arguments: &RunArgs) -> Result<()> {
    let daemon = config.daemon.clone();
    let mut instance = Instance::claim(&daemon)?;
    let netlink = Netlink::open()?;
    let interfaces = Interfaces::examine(&daemon, &netlink.read(&[]).await?)?;
    let server = Server::bind(&daemon.socket, daemon.socket_group.as_ref().map(Name::as_str)).await?;

    let pins = daemon.pin_path.as_deref();
    if let (Some(pins), true) = (pins, arguments.fresh) {
        remove_pinned_maps(pins)?;
    }
    let (prepare, prepared) = mpsc::unbounded_channel();
    let mut controller = load(config, (arguments.config.clone(), text), prepare)?;
    let (prober, reports) = Prober::start()?;
    let mut path = ProbePath::load().context("load the programs of health checks")?;
    let addresses = controller.backend_addresses();
    let network = first_network(&netlink, &addresses).await?;
    controller.set_network(Monotonic::now(), &network)?;
    turn_probes(&mut path, &controller, &network).context("have health checks go through to the backends")?;
    prober.check(controller.targets());
    // The rings are written before the first packet comes; those that were taken over are in use already, by backends
    // that only the program of the same daemon reaches.
    let is_adopted = controller.datapath_mut().is_adopted();
    if !is_adopted {
        controller.tick(Monotonic::now())?;
    }
    let attached = attach::attach(controller.datapath_mut(), &interfaces, &daemon);
    if let (Err(_), Some(pins), false) = (&attached, pins, is_adopted) {
        // What no program uses is not left behind.
        remove_pinned_maps(pins)?;
    }
    let mut attachments = attached?;
    let mut pin_watch = PinWatch::new(Monotonic::now(), &mut instance, daemon.pin_path.clone())?;
    controller.tick(Monotonic::now())?;
    // The interfaces as they are with the program: what is followed from here on.
    let network = netlink.read(&addresses).await?;
    attachments.watch(controller.datapath_mut(), &network);
    controller.set_interfaces(attachments.status());
    tracing::info!("balancing on {} in {} mode", interfaces.names(), attachments.mode);
    warn_of_offloads(&attachments);
    if let Some(shared) = doctor::shared_ports(controller.configured()) {
        tracing::warn!("{shared}");
    }
    warn_without_forwarding(&controller);

    let mut announcer = Announcer::open()?;
    let told = path_mtu::listen()?;
    announce(&mut announcer, &controller, &network);

    let (to_controller, from_kernel) = watch::channel(network);
    let (to_netlink, addresses) = watch::channel(addresses);
    let (neighbours, asked_for) = mpsc::channel(1);
    let (publish, published) = watch::channel(publication(&mut controller, Monotonic::now())?);
    let (ask, asked) = api::commands(api::ANSWER_LIMIT);
    let mut serving = server.serve_beside(published, ask)?;
    capabilities::keep_those_of_the_controller()?;
    let mut supervisor = Supervisor::from_environment(Monotonic::now());
    supervisor.ready();
    let kernel = Kernel { network: from_kernel, addresses: to_netlink, neighbours, announcer, told };
    let health = (prober, path, reports);
    tokio::select! {
        result = steer(&mut controller, (&mut attachments, &mut pin_watch), kernel, health, (asked, prepared), &publish, &mut supervisor) => result,
        result = netlink.follow(addresses, asked_for, to_controller) => result.context("follow the kernel's routes and neighbours"),
        error = serving.ended() => Err(error),
    }
}

/// How large the maps are that a configuration asks for.
pub(super) fn sizes(config: &Config) -> Sizes {
    Sizes {
        flows: config.daemon.max_flows,
        services: config.daemon.max_services,
        backends: config.daemon.max_backends,
        ipv6: config.ipv6(),
        profiled_age: Profile::reach(config.daemon.window.max(KNOWN_AGE)),
    }
}

fn load(
    config: Config,
    source: (PathBuf, String),
    prepared: mpsc::UnboundedSender<Prepared>,
) -> Result<Controller> {
    let sizes = sizes(&config);
    let log_refusals = tracing::enabled!(target: "balancer_program", tracing::Level::DEBUG);
    let mut datapath = Datapath::load(sizes, log_refusals, config.daemon.pin_path.as_deref())?;
    if log_refusals {
        tokio::spawn(datapath.follow_log()?);
    }
    Controller::new(datapath, source, config, prepared, Monotonic::now())
}

/// The kernel's tables, after a short wait for the neighbours of all backends.
pub(super) async fn first_network(netlink: &Netlink, addresses: &[IpAddr]) -> Result<Network> {
    let deadline = Monotonic::now().plus(NEIGHBOURS_AT_START);
    loop {
        let network = netlink.read(addresses).await?;
        if network.unconfirmed(addresses).is_empty() || Monotonic::now() > deadline {
            return Ok(network);
        }
        netlink.confirm(&network, addresses).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// What the control socket tells without asking the controller.
fn publication(controller: &mut Controller, now: Monotonic) -> Result<Published> {
    Ok(Published { status: Arc::new(controller.status(now)?), selected: controller.selected() })
}

/// What comes from the kernel's tables, and what is asked of them.
struct Kernel {
    network: watch::Receiver<Network>,
    /// Those to which the routes are wanted.
    addresses: watch::Sender<Vec<IpAddr>>,
    /// Those to be found: interface and address.
    neighbours: mpsc::Sender<(u32, IpAddr)>,
    announcer: Announcer,
    /// What routers say of the ways to backends.
    told: mpsc::Receiver<Told>,
}

/// Has health checks go the ways that the services' packets go.
fn turn_probes(path: &mut ProbePath, controller: &Controller, network: &Network) -> Result<()> {
    path.set_ways(controller.probe_ways())?;
    let names = &controller.daemon().interfaces;
    let links = names.iter().filter_map(|name| network.link(name.as_str()));
    let interfaces: Vec<_> = links.map(|link| (link.index, link.name.as_str())).collect();
    path.set_interfaces(&interfaces)
}

/// Tells the neighbours on the configured interfaces where the advertised addresses are.
fn announce(announcer: &mut Announcer, controller: &Controller, network: &Network) {
    let names = &controller.daemon().interfaces;
    let links: Vec<&Link> = names.iter().filter_map(|name| network.link(name.as_str())).collect();
    announcer.announce(&controller.advertised(), &links);
}

/// Warns of what drivers do to packets before the program sees them.
fn warn_of_offloads(attachments: &Attachments) {
    for interface in attachments.status() {
        for finding in doctor::offloads(&interface.name, interface.mode == AttachedMode::Generic) {
            tracing::warn!("{finding}");
        }
    }
}

fn warn_without_forwarding(controller: &Controller) {
    for finding in doctor::without_forwarding(controller.daemon(), controller.configured()) {
        tracing::warn!("{finding}");
    }
}

async fn steer(
    controller: &mut Controller,
    (attachments, pin_watch): (&mut Attachments, &mut PinWatch<'_>),
    Kernel { mut network, addresses, neighbours, mut announcer, mut told }: Kernel,
    (prober, mut path, mut reports): (Prober, ProbePath, mpsc::Receiver<Report>),
    (mut asked, mut prepared): (mpsc::Receiver<Command>, mpsc::UnboundedReceiver<Prepared>),
    publish: &watch::Sender<Published>,
    supervisor: &mut Supervisor,
) -> Result<()> {
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let mut hangup = signal(SignalKind::hangup()).context("listen for SIGHUP")?;
    let mut tick = interval(controller.daemon().tick);
    tick.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut shown = Monotonic::now();
    let mut heard = Vec::new();
    let mut generation = controller.generation();
    loop {
        let mut changing = None;
        tokio::select! {
            biased;
            _ = interrupt.recv() => break,
            _ = terminate.recv() => break,
            _ = hangup.recv() => controller.reload(),
            changed = network.changed() => {
                if changed.is_err() {
                    bail!("the kernel's routes and neighbours are no longer followed");
                }
                let seen = network.borrow_and_update().clone();
                if attachments.watch(controller.datapath_mut(), &seen) {
                    pin_watch.renew();
                }
                controller.set_interfaces(attachments.status());
                // An interface may go between the look and the write; the next look says so.
                if let Err(error) = controller.set_network(Monotonic::now(), &seen) {
                    tracing::warn!("{error:#}");
                }
                if let Err(error) = turn_probes(&mut path, controller, &seen) {
                    tracing::warn!("health checks may not get through: {error:#}");
                }
                controller.tick(Monotonic::now())?;
                announce(&mut announcer, controller, &seen);
            }
            _ = tick.tick() => {
                let now = Monotonic::now();
                controller.tick_in_time(now)?;
                supervisor.alive(now);
                pin_watch.look(now);
                if let Some(neighbour) = controller.take_unresolved() {
                    // One that finds no room is missed again by the next answer.
                    let _ = neighbours.try_send(neighbour);
                }
                if now.since(shown) >= STATUS_PERIOD {
                    shown = now;
                    publish.send_replace(publication(controller, now)?);
                } else {
                    publish.send_modify(|published| published.selected = controller.selected());
                }
            }
            Some(change) = prepared.recv() => {
                let now = Monotonic::now();
                changing = Some(now);
                controller.change(now, change);
            }
            Some(told) = told.recv() => controller.narrow(Monotonic::now(), &told),
            Some(command) = asked.recv() => controller.answer(command),
            count = reports.recv_many(&mut heard, REPORTS) => {
                if count == 0 {
                    bail!("the thread that checks the backends' health has ended");
                }
                controller.hear(Monotonic::now(), &heard)?;
                heard.clear();
            }
            // Everybody else has had a turn before the next slice.
            () = yield_now(), if controller.is_searching() => controller.search(Monotonic::now()),
        }
        if generation != controller.generation() {
            generation = controller.generation();
            let wanted = controller.backend_addresses();
            // Thousands of routes are not asked for again because of a weight.
            addresses.send_if_modified(|known| {
                let is_changed = *known != wanted;
                *known = wanted;
                is_changed
            });
            if let Err(error) = turn_probes(&mut path, controller, &network.borrow()) {
                tracing::warn!("health checks may not get through: {error:#}");
            }
            prober.check(controller.targets());
            announce(&mut announcer, controller, &network.borrow());
            warn_without_forwarding(controller);
        }
        if let Some(begun) = changing {
            controller.note_change_time(Monotonic::now().since(begun));
        }
    }
    supervisor.stopping();
    Ok(())
}
