//! Questions that are asked once, about what is there: interfaces in detail, and what would become of a packet.

use std::{io, net::IpAddr};

use anyhow::{Context as _, Result};
use futures_util::TryStreamExt as _;
use rtnetlink::{
    Error, RouteMessageBuilder,
    packet_route::{
        link::{InfoKind, LinkAttribute, LinkFlags, LinkInfo, LinkMessage, LinkXdp},
        route::RouteType,
    },
};

use super::{Netlink, attachment};
use crate::address;

/// More about an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Detail {
    /// Its index.
    pub index: u32,
    /// Whether somebody is at the other end.
    pub has_carrier: bool,
    /// What makes a virtual one, as `ip link add type` names it; empty for a NIC.
    pub kind: String,
    /// Of a veth whose other end can be asked.
    pub far_end: Option<FarEnd>,
}

/// The other end of a veth.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FarEnd {
    /// Its name where it is.
    pub name: String,
    /// Whether that is this network namespace.
    pub is_here: bool,
    /// Whether it has an XDP program, natively.
    pub has_native_program: bool,
}

/// What the kernel would do with a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Taken {
    /// Take it in as this host's.
    In,
    /// Refuse its source: one that it would not answer by the same way (`rp_filter`), or that nobody has.
    Refused,
    /// Anything else.
    NotIn(String),
}

impl Netlink {
    /// All interfaces in detail.
    ///
    /// # Errors
    ///
    /// When the kernel does not answer.
    pub async fn details(&self) -> Result<Vec<Detail>> {
        let messages: Vec<LinkMessage> =
            self.handle.link().get().execute().try_collect().await.context("read the network interfaces")?;
        let mut details = Vec::new();
        for message in &messages {
            let kind = kind_of(message);
            let far_end = if kind == "veth" { self.far_end(message).await } else { None };
            let has_carrier = message.header.flags.contains(LinkFlags::LowerUp);
            details.push(Detail { index: message.header.index, has_carrier, kind, far_end });
        }
        Ok(details)
    }

    /// The other end of a veth: in another network namespace too, where this process may look (Linux 4.15).
    async fn far_end(&self, message: &LinkMessage) -> Option<FarEnd> {
        let (mut peer, mut namespace) = (None, None);
        for attribute in &message.attributes {
            match attribute {
                LinkAttribute::Link(index) => peer = Some(*index),
                LinkAttribute::LinkNetNsId(id) => namespace = Some(*id),
                _ => {}
            }
        }
        let mut request = self.handle.link().get().match_index(peer?);
        if let Some(namespace) = namespace {
            request.message_mut().attributes.push(LinkAttribute::IfNetnsId(namespace));
        }
        let answer = request.execute().try_next().await.ok()??;
        let mut end = FarEnd { name: String::new(), is_here: namespace.is_none(), has_native_program: false };
        for attribute in &answer.attributes {
            match attribute {
                LinkAttribute::IfName(name) => end.name.clone_from(name),
                LinkAttribute::Xdp(attributes) => end.has_native_program = is_native(attributes),
                _ => {}
            }
        }
        Some(end)
    }

    /// What would become of a packet from `source` to `destination` that came in by an interface.
    pub async fn taken(&self, source: IpAddr, destination: IpAddr, ifindex: u32) -> Taken {
        let request = RouteMessageBuilder::<IpAddr>::new()
            .destination_prefix(destination, address::width(destination))
            .and_then(|builder| builder.source_prefix(source, address::width(source)));
        let request = match request {
            Ok(request) => request.input_interface(ifindex).build(),
            Err(error) => return Taken::NotIn(error.to_string()),
        };
        match self.handle.route().get(request).execute().try_next().await {
            Ok(Some(answer)) if answer.header.kind == RouteType::Local => Taken::In,
            Ok(Some(answer)) => Taken::NotIn(format!("the route is of the kind {:?}", answer.header.kind)),
            Ok(None) => Taken::NotIn("there is no route".to_owned()),
            Err(Error::NetlinkError(error)) => match error.raw_code().saturating_neg() {
                // The second on newer kernels (6.14), which no longer say why.
                libc::EXDEV | libc::EINVAL => Taken::Refused,
                code => Taken::NotIn(io::Error::from_raw_os_error(code).to_string()),
            },
            Err(error) => Taken::NotIn(error.to_string()),
        }
    }
}

fn kind_of(message: &LinkMessage) -> String {
    let infos = message.attributes.iter().filter_map(|attribute| match attribute {
        LinkAttribute::LinkInfo(infos) => Some(infos),
        _ => None,
    });
    let kind = infos.flatten().find_map(|info| match info {
        LinkInfo::Kind(InfoKind::Other(name)) => Some(name.clone()),
        LinkInfo::Kind(kind) => Some(kind.to_string()),
        _ => None,
    });
    kind.unwrap_or_default()
}

fn is_native(attributes: &[LinkXdp]) -> bool {
    attachment(attributes).is_some_and(|attached| !attached.is_generic)
}
