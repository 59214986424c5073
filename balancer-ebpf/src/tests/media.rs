//! Media of RTSP services, in both directions.

use balancer_common::{FlowEntry, Reason, Service, TCP, UDP, endpoint, flags, option};

use super::{
    bed::{Bed, CLIENT, FIN_ACK, VIP, to_client, to_vip},
    frame::{Endpoint, Frame, RST, SYN, address},
};
use crate::Verdict;

const DATA_PORT: u16 = 6970;

/// Two servers of an RTSP service at `VIP`.
fn rtsp() -> Bed {
    let mut bed = Bed::new(2);
    let control = bed.kernel.key(VIP, TCP);
    bed.kernel.services.get_mut(&control).unwrap().options = option::RTSP;
    let media = bed.kernel.key((VIP.0, DATA_PORT), UDP);
    let service = Service { id: 0, address: address(VIP.0), options: option::MEDIA, ..Bed::UDP_SERVICE };
    bed.kernel.services.insert(media, service);
    for (id, (address, _)) in Bed::BACKENDS.into_iter().take(2).enumerate() {
        let key = bed.kernel.key((address, DATA_PORT), UDP);
        bed.kernel.endpoints.insert(key, endpoint::MEDIA | id as u32);
    }
    bed
}

/// A datagram between the client's media port and a server's data port.
fn sent(to: Endpoint) -> Frame {
    Frame::udp((CLIENT.0, 5000), to, b"hello")
}

fn received(from: Endpoint) -> Frame {
    Frame::udp(from, (CLIENT.0, 5000), b"tone")
}

/// Runs a frame that must leave with these endpoints.
#[track_caller]
fn translated(bed: &Bed, ingress: u32, frame: &Frame, source: Endpoint, destination: Endpoint) {
    let input = frame.bytes();
    let (verdict, output) = bed.run(ingress, &input);
    assert_eq!(verdict, Verdict::Redirect(u16::from(ingress == 1)), "{:?}", bed.kernel.drops());
    let (to, from) = match ingress {
        1 => (output[..6].try_into().unwrap(), Bed::BACKEND_SIDE),
        _ => (Bed::CLIENT_MAC, Bed::CLIENT_SIDE),
    };
    assert_eq!(output, super::frame::translated(&input, to, from, source, destination));
}

both! {
fn media_follow_the_control_connection_whoever_speaks_first() {
    for server_first in [false, true] {
        for skipped in 0..2 {
            let bed = rtsp();
            (0..skipped).for_each(|port| _ = bed.establish(([10, 0, 1, 99], port + 1)));
            let backend = bed.establish(CLIENT);
            assert_eq!(backend, usize::from(skipped));
            let server = (Bed::BACKENDS[backend].0, DATA_PORT);
            let vip = (VIP.0, DATA_PORT);
            let flows = bed.flows();
            let before = bed.kernel.counted(backend);
            let exchange = |is_server| match is_server {
                true => translated(&bed, 2, &received(server), vip, (CLIENT.0, 5000)),
                false => translated(&bed, 1, &sent(vip), (CLIENT.0, 5000), server),
            };
            exchange(server_first);
            exchange(!server_first);
            exchange(true);
            let after = bed.kernel.counted(backend);
            assert_eq!(after.reply.packets - before.reply.packets, 2);
            assert_eq!(after.request.packets - before.request.packets, 1);
            assert_eq!(bed.flows(), flows, "a part of its connection, not a flow of its own");
            bed.kernel.assert_active_is_exact();
        }
    }
}

fn without_a_live_control_connection_there_are_none() {
    let vip = (VIP.0, DATA_PORT);
    let refused = |bed: &Bed| {
        bed.refused(1, &sent(vip).bytes(), Reason::NoControlConnection);
        for (address, _) in &Bed::BACKENDS[..2] {
            bed.refused(2, &received((*address, DATA_PORT)).bytes(), Reason::NoControlConnection);
        }
    };
    let bed = rtsp();
    refused(&bed);
    bed.establish(([10, 0, 1, 99], 1));
    refused(&bed);
    for end in [&[to_vip(RST)][..], &[to_vip(FIN_ACK), to_client(1, FIN_ACK)]] {
        let bed = rtsp();
        bed.establish(([10, 0, 1, 99], 1));
        let backend = bed.establish(CLIENT);
        // Another server has nothing to send to this client.
        bed.refused(
            2,
            &received((Bed::BACKENDS[1 - backend].0, DATA_PORT)).bytes(),
            Reason::NoControlConnection,
        );
        for frame in end {
            match frame.source == CLIENT {
                true => _ = bed.request(frame),
                false => bed.reply(frame, VIP),
            }
        }
        refused(&bed);
    }
}

/// A player that always uses the same port is sent to the other server, while the media of its last connection are remembered.
fn media_leave_the_server_of_a_connection_that_is_over() {
    let bed = rtsp();
    let vip = (VIP.0, DATA_PORT);
    let player = (CLIENT.0, 5000);
    let server = |backend: usize| (Bed::BACKENDS[backend].0, DATA_PORT);
    for turn in 0..4 {
        let control = (CLIENT.0, CLIENT.1 + turn as u16);
        let backend = bed.establish(control);
        assert_eq!(backend, turn % 2);
        translated(&bed, 2, &received(server(backend)), vip, player);
        translated(&bed, 1, &sent(vip), player, server(backend));
        translated(&bed, 2, &received(server(backend)), vip, player);
        // The other one has nothing more to send to it, and takes nothing back.
        bed.refused(2, &received(server(1 - backend)).bytes(), Reason::NoControlConnection);
        translated(&bed, 1, &sent(vip), player, server(backend));
        bed.request(&Frame::tcp(control, VIP, RST));
        bed.kernel.assert_active_is_exact();
    }
}

/// The place of a control connection in the flow table has gone to another flow of the same client.
fn another_flow_is_not_taken_for_the_control_connection() {
    for (vip, protocol, is_it) in
        [(VIP, TCP, true), (Bed::VIPS[1], TCP, false), (VIP, UDP, false), (Bed::VIPS[1], UDP, false)]
    {
        let mut bed = rtsp();
        let other = bed.kernel.key(Bed::VIPS[1], TCP);
        bed.kernel.services.get_mut(&other).unwrap().id = 1;
        bed.establish(CLIENT);
        bed.request(&to_vip(RST));
        let port = (CLIENT.0, CLIENT.1 + 1);
        bed.request(&match protocol {
            TCP => Frame::tcp(port, vip, SYN),
            _ => Frame::udp(port, vip, b"ask"),
        });
        let is_other = |entry: &FlowEntry| {
            entry.key.source_port == port.1.to_be_bytes() && entry.control.flags() & flags::REPLY == 0
        };
        let (place, entry) = bed.kernel.memory.live().find(|(_, entry)| is_other(entry)).unwrap();
        bed.kernel.clients.borrow_mut().values_mut().for_each(|client| client.entry = place);
        let vip = (VIP.0, DATA_PORT);
        if is_it {
            translated(&bed, 1, &sent(vip), (CLIENT.0, 5000), (Bed::BACKENDS[usize::from(entry.backend)].0, DATA_PORT));
        } else {
            bed.refused(1, &sent(vip).bytes(), Reason::NoControlConnection);
        }
    }
}

fn other_ports_of_the_server_are_none_of_it() {
    let bed = rtsp();
    let backend = bed.establish(CLIENT);
    bed.passed(2, &received((Bed::BACKENDS[backend].0, DATA_PORT + 1)).bytes());
    bed.passed(1, &sent((VIP.0, DATA_PORT + 1)).bytes());
}
}
