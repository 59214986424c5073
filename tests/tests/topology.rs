//! The bench itself, without a balancer: what every other test stands on.

use std::{
    net::{SocketAddr, TcpListener, TcpStream},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use balancer_tests::{
    Netns, Plan, packet,
    packet::Path,
    ping,
    socket::FrameSocket,
    topology::{self, BALANCER_BACKEND_SIDE, BALANCER_CLIENT_SIDE, CLIENT, VIP},
};

const LIMIT: Duration = Duration::from_secs(2);

#[test]
fn neighbours_reach_each_other() -> Result<()> {
    let bench = Plan::backends(2).build()?;
    ping::ping(&bench.client, BALANCER_CLIENT_SIDE, LIMIT)?;
    for number in [1, 2] {
        ping::ping(bench.backend(number)?, BALANCER_BACKEND_SIDE, LIMIT)?;
        ping::ping(&bench.balancer, topology::backend_address(number), LIMIT)?;
    }
    Ok(())
}

/// A listening backend, reached from where the kernel alone would have to forward.
fn connects(plan: &Plan) -> Result<bool> {
    let bench = plan.build()?;
    let address = SocketAddr::from((topology::backend_address(1), 8080));
    let _listener = bench.backend(1)?.run(|| TcpListener::bind(address).context("listen on the backend"))?;
    bench.client.ip(&format!("route add 10.0.2.0/24 via {BALANCER_CLIENT_SIDE}"))?;
    bench.client.run(|| Ok(TcpStream::connect_timeout(&address, Duration::from_millis(500)).is_ok()))
}

#[test]
fn nothing_crosses_the_balancer_unless_its_kernel_forwards() -> Result<()> {
    ensure!(!connects(&Plan::backends(1))?, "connected although nothing forwards");
    ensure!(
        connects(&Plan { forwarding: true, ..Plan::backends(1) })?,
        "not connected although the kernel forwards"
    );
    Ok(())
}

fn xdp_mode(netns: &Netns, device: &str) -> Result<Option<u64>> {
    let text = netns.ip(&format!("-json link show dev {device}"))?;
    let links: serde_json::Value = serde_json::from_str(&text).context("parse what ip printed")?;
    Ok(links.pointer("/0/xdp/mode").and_then(serde_json::Value::as_u64))
}

#[test]
fn far_ends_have_a_native_program_whatever_the_mtu() -> Result<()> {
    const NATIVE: Option<u64> = Some(1);
    for mtu in [1500, 9000] {
        let bench = Plan { mtu, ..Plan::backends(1) }.build()?;
        ensure!(xdp_mode(&bench.client, "c0")? == NATIVE, "no native program on c0 with an MTU of {mtu}");
        ensure!(xdp_mode(&bench.switch, "lkp")? == NATIVE, "no native program on lkp with an MTU of {mtu}");
        ensure!(xdp_mode(&bench.balancer, "lc")?.is_none(), "a program on the balancer's own device");
    }
    Ok(())
}

#[test]
fn ipv6_addresses_work_when_asked_for() -> Result<()> {
    let bench = Plan { ipv6: true, ..Plan::backends(1) }.build()?;
    let address = SocketAddr::from((topology::backend_address6(1), 8080));
    ensure!(address.to_string() == "[2001:db8:2::11]:8080", "the backend's address is {address}");
    let _listener = bench.backend(1)?.run(|| TcpListener::bind(address).context("listen on the backend"))?;
    bench.balancer.run(|| TcpStream::connect_timeout(&address, LIMIT).context("connect")).map(drop)
}

#[test]
fn frames_arrive_byte_for_byte_with_their_tags() -> Result<()> {
    let bench = Plan::backends(1).build()?;
    let sender = FrameSocket::open(&bench.client, "c0")?;
    let receiver = FrameSocket::open(&bench.balancer, "lc")?;
    let packet = Path::new((CLIENT, 40_000), (VIP, 80)).udp(b"hello")?;
    let plain = packet::ethernet(topology::mac(BALANCER_CLIENT_SIDE), topology::mac(CLIENT), &packet);
    let one_tag = packet::tagged(&plain, &[(0x8100, 7)])?;
    let two_tags = packet::tagged(&plain, &[(0x88a8, 9), (0x8100, 7)])?;
    for frame in [plain, one_tag, two_tags] {
        sender.send(&frame)?;
        let arrived = receiver.receive(LIMIT, |arrived| (*arrived == *frame).then_some(()))?;
        ensure!(arrived.is_some(), "the frame {} did not arrive", packet::to_hex(&frame));
    }
    ensure!(receiver.receive(Duration::from_millis(20), |_| Some(()))?.is_none(), "a frame arrived twice");
    Ok(())
}

#[test]
fn a_socket_on_the_client_finishes_its_checksums() -> Result<()> {
    let bench = Plan::backends(1).build()?;
    let receiver = FrameSocket::open(&bench.balancer, "lc")?;
    let socket = bench.client.run(|| std::net::UdpSocket::bind((CLIENT, 40_000)).context("bind"))?;
    socket.send_to(b"hello", (BALANCER_CLIENT_SIDE, 9)).context("send a datagram")?;
    let arrived = receiver.receive_packet(LIMIT, |packet| packet.get(9) == Some(&17))?;
    let expected = Path::new((CLIENT, 40_000), (BALANCER_CLIENT_SIDE, 9)).udp(b"hello")?;
    // From the UDP header on: the kernel chooses the IP header's id.
    ensure!(
        arrived.as_deref().and_then(|packet| packet.get(20..)) == expected.get(20..),
        "arrived: {arrived:?}, expected: {expected:?}"
    );
    Ok(())
}
