//! Media of RTSP services whose client has gone to another backend with its control connection.

use std::collections::{HashMap, HashSet};

use balancer_common::{BackendId, FlowEntry, ServiceId, TCP};

/// A client of a service, by its address as keys have it.
type Client = (ServiceId, u8, [u8; 4]);

/// Where the live control connections lead, as walks over the flow table have seen it.
#[derive(Debug, Default)]
pub(super) struct Controls {
    services: HashSet<ServiceId>,
    /// Of this walk so far.
    seen: HashMap<Client, Vec<BackendId>>,
    /// Of the last whole one.
    known: HashMap<Client, Vec<BackendId>>,
}

impl Controls {
    /// Begins a walk; `services` are those with RTSP.
    pub(super) fn begin(&mut self, services: impl Iterator<Item = ServiceId>) {
        self.services = services.collect();
        self.known = std::mem::take(&mut self.seen);
    }

    /// Takes note of a flow, by the entry of its requests. Whether it is of media that have to leave their backend: its client's
    /// control connections lead to others. Without any, they go on.
    pub(super) fn have_left(&mut self, entry: &FlowEntry) -> bool {
        if !self.services.contains(&entry.service) {
            return false;
        }
        let client = (entry.service, entry.key.family, entry.key.source);
        if entry.key.protocol != TCP {
            return self.known.get(&client).is_some_and(|backends| !backends.contains(&entry.backend));
        }
        if !entry.control.state().is_closing() {
            self.seen.entry(client).or_default().push(entry.backend);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use balancer_common::{Control, FlowState, UDP, family};
    use bytemuck::Zeroable as _;

    use super::*;

    fn entry(protocol: u8, client: u8, backend: BackendId, state: FlowState) -> FlowEntry {
        let mut entry =
            FlowEntry { service: 3, backend, control: Control::new(state, 0, 1), ..FlowEntry::zeroed() };
        entry.key.protocol = protocol;
        entry.key.family = family::IPV4;
        entry.key.source = [10, 0, 1, client];
        entry
    }

    #[test]
    fn media_leave_where_no_control_connection_of_their_client_leads() {
        use FlowState::{BackendReset, Closing, Established, HalfOpen};
        let controls = [
            entry(TCP, 1, 7, Established),
            entry(TCP, 2, 8, HalfOpen),
            entry(TCP, 2, 9, Established),
            entry(TCP, 3, 8, Closing),
            entry(TCP, 4, 8, BackendReset),
        ];
        let media = |client, backend| entry(UDP, client, backend, Established);
        let cases = [
            (media(1, 7), false),
            (media(1, 8), true),
            (media(2, 8), false),
            (media(2, 9), false),
            (media(2, 7), true),
            // There is no live one.
            (media(3, 7), false),
            (media(4, 7), false),
            (media(5, 7), false),
            (FlowEntry { service: 4, ..media(1, 8) }, false),
        ];
        let mut walks = Controls::default();
        for walk in 0..3 {
            walks.begin([3].into_iter());
            for control in &controls {
                assert!(!walks.have_left(control));
            }
            for (media, expected) in &cases {
                // What the first walk has seen, the second one knows.
                assert_eq!(walks.have_left(media), *expected && walk > 0, "{media:?}");
            }
        }
        walks.begin([4].into_iter());
        assert!(!walks.have_left(&cases[1].0), "a service without RTSP any more");
    }
}
