//! What stands around a segment: tags, options, extension headers.

use std::{vec, vec::Vec};

use balancer_common::{Reason, family, role};

use super::{
    bed::{Bed, CLIENT, SYN_ACK, VIP, answer, datagram, to_client, to_vip},
    frame::{ACK, FAMILY, Frame, L4, SYN, address, l3_at},
};
use crate::Verdict;

const TAG: [u8; 4] = [0x81, 0x00, 0x00, 0x0a];
const OUTER: [u8; 4] = [0x88, 0xa8, 0x00, 0x05];
const PRIORITY: [u8; 4] = [0x81, 0x00, 0xe0, 0x00];

both! {
    /// A frame leaves with the tags that it came with, both ways.
    fn up_to_two_tags_stay_where_they_are() {
        for tags in [vec![TAG], vec![PRIORITY], vec![OUTER, TAG], vec![TAG, TAG]] {
            let bed = Bed::new(1);
            let tagged = |frame: Frame| Frame { tags: tags.clone(), ..frame };
            bed.request(&tagged(to_vip(SYN)));
            bed.reply(&tagged(to_client(0, SYN_ACK)), VIP);
            bed.request(&tagged(Frame { payload: vec![7; 30], ..to_vip(ACK) }));
            bed.request(&tagged(datagram()));
            bed.reply(&tagged(answer(0)), VIP);
            let bytes = l3_at(&tagged(datagram()).bytes());
            assert_eq!(bytes, 14 + tags.len() * 4);
        }
    }

    fn three_tags_pass() {
        let bed = Bed::new(1);
        bed.passed(1, &Frame { tags: vec![OUTER, TAG, TAG], ..to_vip(SYN) }.bytes());
    }

    /// A refused frame is answered with its tags.
    fn an_answer_has_the_tags_of_its_question() {
        for tags in [vec![], vec![TAG], vec![OUTER, TAG]] {
            for frame in [to_vip(ACK), datagram()] {
                let mut bed = Bed::new(1);
                for service in bed.kernel.services.values_mut() {
                    service.answers = balancer_common::answer::UNKNOWN_FLOW | balancer_common::answer::NO_BACKEND;
                }
                bed.kernel.sends_icmp.set(true);
                bed.set_ring(&[]);
                let (verdict, output) = bed.run(1, &Frame { tags: tags.clone(), ..frame }.bytes());
                assert_eq!(verdict, Verdict::Transmit, "{:?}", bed.kernel.drops());
                assert_eq!(output[12..12 + tags.len() * 4], tags.concat());
                let l3 = 14 + tags.len() * 4;
                assert_eq!(l3_at(&output), l3);
                assert_eq!(output[l3] >> 4, if FAMILY.get() == family::IPV4 { 4 } else { 6 });
            }
        }
    }
}

/// An extension header of 8 bytes that says nothing.
fn empty(number: u8) -> (u8, Vec<u8>) {
    (number, vec![0, 1, 4, 0, 0, 0, 0])
}

fn ipv6() -> Bed {
    FAMILY.set(family::IPV6);
    Bed::new(1)
}

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const AUTHENTICATION: u8 = 51;
const DESTINATION: u8 = 60;

#[test]
fn extension_headers_are_followed_and_stay_untouched() {
    let chains = [
        vec![empty(HOP_BY_HOP)],
        vec![empty(HOP_BY_HOP), empty(DESTINATION), (ROUTING, vec![0, 0, 0, 0, 0, 0, 0]), empty(DESTINATION)],
        // An authentication header's length is in words of 4 bytes, less 2; a fragment's second byte is none.
        vec![(AUTHENTICATION, [&[4, 0, 0][..], &[7; 20]].concat())],
        vec![(FRAGMENT, vec![0xff, 0, 0, 1, 2, 3, 4])],
        vec![(DESTINATION, [&[2][..], &[0; 22]].concat())],
        vec![empty(DESTINATION); 8],
        vec![empty(DESTINATION); 10],
    ];
    for extensions in chains {
        let bed = ipv6();
        let with = |frame: Frame| Frame { extensions: extensions.clone(), ..frame };
        bed.request(&with(to_vip(SYN)));
        bed.reply(&with(to_client(0, SYN_ACK)), VIP);
        bed.request(&with(Frame { payload: vec![7; 30], ..to_vip(ACK) }));
        bed.request(&with(datagram()));
        bed.reply(&with(answer(0)), VIP);
        // The flow is the same with other headers, and without.
        bed.request(&to_vip(ACK));
        assert_eq!(bed.flows(), (2, 0));
    }
}

#[test]
fn what_can_t_be_followed_is_refused_by_name() {
    let mut bed = ipv6();
    let with = |extensions: Vec<(u8, Vec<u8>)>| Frame { extensions, ..to_vip(SYN) }.bytes();
    bed.refused(1, &with(vec![empty(DESTINATION); 11]), Reason::ExtensionHeaders);
    bed.refused(1, &with(vec![(DESTINATION, [&[255][..], &[0; 2046]].concat())]), Reason::ExtensionHeaders);
    // It must go elsewhere first.
    bed.refused(1, &with(vec![(ROUTING, vec![0, 4, 1, 0, 0, 0, 0])]), Reason::ExtensionHeaders);
    let rest = with(vec![(FRAGMENT, vec![0, 0, 8, 1, 2, 3, 4])]);
    bed.refused(1, &rest, Reason::Fragment);
    // Longer than the packet.
    let mut long = with(vec![empty(DESTINATION)]);
    long[55] = 20;
    bed.refused(1, &long, Reason::Malformed);
    // To somebody else, all of it is the kernel's business; and so is what has no ports.
    bed.kernel.roles.remove(&address(VIP.0));
    bed.passed(1, &rest);
    let mut nothing = with(vec![empty(DESTINATION)]);
    nothing[54] = 59;
    bed.passed(1, &nothing);
}

#[test]
fn a_datagram_without_a_sum_is_refused() {
    let bed = ipv6();
    let bare = Frame { l4: L4::Udp { is_summed: false }, ..datagram() };
    bed.refused(1, &bare.bytes(), Reason::NoChecksum);
    bed.request(&datagram());
    bed.refused(2, &Frame { l4: L4::Udp { is_summed: false }, ..answer(0) }.bytes(), Reason::NoChecksum);
    // Not to a service: tunnels do that.
    bed.passed(
        1,
        &Frame { l4: L4::Udp { is_summed: false }, ..Frame::udp(CLIENT, (VIP.0, 4789), b"x") }.bytes(),
    );
}

/// Digests that are alike make no flows alike.
#[test]
fn a_flow_is_told_by_its_whole_addresses() {
    let bed = ipv6();
    bed.request(&to_vip(SYN));
    let (index, _) =
        bed.kernel.memory.live().find(|(_, entry)| entry.key.destination_port == [0, 80]).unwrap();
    let other = address([10, 0, 1, 99]);
    bed.kernel.memory.change_source(index, other);
    let before = Vec::from_iter(bed.kernel.memory.live());
    let (verdict, _) = bed.run(1, &to_vip(SYN).bytes());
    assert_eq!(verdict, Verdict::Drop, "{:?}", bed.kernel.drops());
    assert_eq!(Vec::from_iter(bed.kernel.memory.live()), before);
    assert_eq!(bed.traffic()[0], 1);
}

/// An address that only looks like a service's, or a backend's, by its digest.
#[test]
fn a_service_is_told_by_its_whole_address() {
    let mut bed = ipv6();
    for service in bed.kernel.services.values_mut() {
        service.address = address([192, 0, 2, 77]);
    }
    bed.passed(1, &to_vip(SYN).bytes());
    let key = bed.kernel.key(Bed::BACKENDS[0], 6);
    bed.kernel.endpoints.insert(key, balancer_common::endpoint::SERVER);
    bed.kernel.roles.insert(address(Bed::BACKENDS[0].0), role::LOCAL);
    bed.passed(2, &to_client(0, ACK).bytes());
}
