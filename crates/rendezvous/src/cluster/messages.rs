//! Requests, events and stream frames between nodes over NATS.

use std::sync::Arc;
use std::time::Duration;

use async_nats::Message;
use bytes::Bytes;
use exec_server_relay::EndReason;
use futures_util::StreamExt as _;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::channel::{ChannelSide, NodeChannel, RemoteUplink};
use super::rules::Claim;
use super::wire::{
    ChannelControl, FramePiece, MAX_ITEMS_PER_MESSAGE, NodeRequest, NodeResponse, OpenRequest,
    OpenResponse, Topic, entry_of,
};
use super::{ClusterResult, ClusterShared, now, send_end};
use crate::mailbox::Mailbox;
use crate::router::{
    AdminEvent, AttachError, EventSubscription, HarnessIdentity, Router as _, Uplink,
};
use crate::tenants::is_tenant;

/// How long to wait for the responses of all nodes.
const ALL_NODES_TIMEOUT: Duration = Duration::from_millis(700);

/// How long to wait for a node to open a channel.
const OPEN_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum bytes of an event: names and a few numbers, none longer than 256 bytes.
const MAX_EVENT_BYTES: usize = 16 << 10;

/// Result of opening a channel to another node.
pub(crate) enum OpenOutcome {
    /// The channel is open.
    Opened(Box<dyn Uplink>),
    /// The executor is not connected to that node, or not any more.
    Moved,
    /// The other node refused the harness.
    Refused(AttachError),
}

/// Subscribes to the messages addressed to this node.
pub(super) async fn listen(shared: &Arc<ClusterShared>) -> Result<(), ClusterResult> {
    let client = &shared.client;
    let prefix = shared.node_subject(&shared.node, "");
    let mut own = client.subscribe(format!("{prefix}>")).await?;
    let start = prefix.len();
    let here = Arc::clone(shared);
    tokio::spawn(async move {
        while let Some(message) = own.next().await {
            here.receive(start, &message);
        }
    });
    Ok(())
}

impl ClusterShared {
    /// Handles one message. Must not wait: the messages of all streams pass through here.
    fn receive(self: &Arc<Self>, start: usize, message: &Message) {
        let subject = &message.subject;
        let rest = subject.get(start..).unwrap_or_default();
        let Some(topic) = Topic::parse(rest) else {
            tracing::debug!(%subject, "ignored an unknown message of another node");
            return;
        };
        let environment = rest.split('.').next().unwrap_or_default();
        let known = |channel: &str, side: ChannelSide| {
            let channel = self.channels.lock().get(channel).cloned();
            channel.filter(|channel| channel.side == side)
        };
        match topic {
            Topic::Open => self.open_here(message),
            Topic::Request => self.answer_request(message),
            Topic::Up(id) => match known(id, ChannelSide::Home) {
                Some(channel) => self.frame(&channel, message),
                None => self.unknown_at_home(environment, id),
            },
            Topic::Down(id) => {
                if let Some(channel) = known(id, ChannelSide::Entry) {
                    self.frame(&channel, message);
                }
            }
            Topic::ToHome(id) => match (known(id, ChannelSide::Home), parse(message)) {
                (Some(channel), Some(control)) => channel.receive_control(self, control),
                (None, Some(ChannelControl::Sync { .. })) => self.unknown_at_home(environment, id),
                _ => {}
            },
            Topic::ToEntry(id) => match (known(id, ChannelSide::Entry), parse(message)) {
                (Some(channel), Some(control)) => channel.receive_control(self, control),
                (None, Some(ChannelControl::Sync { from, .. })) => {
                    send_end(self, &from, environment, id, "home");
                }
                _ => {}
            },
        }
    }

    fn frame(self: &Arc<Self>, channel: &Arc<NodeChannel>, message: &Message) {
        match FramePiece::parse(message.payload.clone()) {
            Some(piece) => channel.receive_piece(self, piece),
            None => channel.fail(self, "a frame without a number"),
        }
    }

    /// Reports to the entry node that this node no longer has the channel.
    fn unknown_at_home(&self, environment: &str, channel: &str) {
        if let Some(node) = entry_of(channel) {
            send_end(self, node, environment, channel, "entry");
        }
    }

    fn reply(&self, message: &Message, answer: &impl Serialize) {
        if let Some(reply) = &message.reply {
            let text = serde_json::to_vec(answer).unwrap_or_default();
            self.outbox.send(reply.clone(), None, text.into());
        }
    }

    /// Attaches a harness of another node to an executor connected here.
    fn open_here(self: &Arc<Self>, message: &Message) {
        let Some(open) = parse::<OpenRequest>(message) else {
            return;
        };
        let Ok(key) = open.key.parse() else {
            return;
        };
        if !self
            .state()
            .rules
            .holds(&open.environment, open.epoch, now())
        {
            return self.reply(message, &OpenResponse::Moved);
        }
        let who = HarnessIdentity {
            environment: open.environment,
            registration: open.registration,
            token: open.token,
            key,
        };
        let mailbox = Mailbox::new(Arc::clone(self.local.backlog()));
        let from = Arc::clone(&open.from);
        let taken = self
            .local
            .attach_harness_now(who.clone(), Arc::clone(&mailbox), Some(from));
        let opened = match taken {
            Ok(uplink) => {
                let channel = NodeChannel::new(
                    self,
                    open.channel,
                    ChannelSide::Home,
                    open.from,
                    who,
                    mailbox,
                );
                channel.set_uplink(uplink);
                self.add_channel(&channel);
                tokio::spawn(channel.pump(Arc::clone(self)));
                OpenResponse::Yes
            }
            Err(AttachError::TooManySockets(limit)) => OpenResponse::TooManySockets(limit),
            Err(_) => OpenResponse::Offline,
        };
        self.reply(message, &opened);
    }

    /// Opens a channel to the node of an executor.
    pub(crate) async fn open(
        self: &Arc<Self>,
        claim: &Claim,
        epoch: u64,
        who: &HarnessIdentity,
        mailbox: &Arc<Mailbox>,
    ) -> OpenOutcome {
        let id: Arc<str> = format!("{}:{}", self.node, self.number()).into();
        let open = OpenRequest {
            channel: Arc::clone(&id),
            from: Arc::clone(&self.node),
            environment: Arc::clone(&who.environment),
            registration: Arc::clone(&who.registration),
            token: Arc::clone(&who.token),
            key: who.key.to_string(),
            epoch,
        };
        let home = Arc::clone(&claim.node);
        let channel = NodeChannel::new(
            self,
            id,
            ChannelSide::Entry,
            Arc::clone(&home),
            who.clone(),
            Arc::clone(mailbox),
        );
        // Registered before the request, so that early messages find the channel. Dropping `entry`
        // notifies the other node.
        self.add_channel(&channel);
        let entry = RemoteUplink {
            shared: Arc::clone(self),
            channel,
        };
        let text = serde_json::to_vec(&open).unwrap_or_default();
        let sent = self
            .client
            .request(self.node_subject(&home, "open"), text.into());
        let answer = match tokio::time::timeout(OPEN_TIMEOUT, sent).await {
            Ok(Ok(message)) => parse(&message),
            _ => None,
        };
        match answer {
            Some(OpenResponse::Yes) => OpenOutcome::Opened(Box::new(entry)),
            Some(OpenResponse::TooManySockets(limit)) => {
                OpenOutcome::Refused(AttachError::TooManySockets(limit))
            }
            Some(OpenResponse::Offline) => OpenOutcome::Refused(AttachError::Offline),
            // The node does not respond, or does not own the claim.
            Some(OpenResponse::Moved) | None => OpenOutcome::Moved,
        }
    }

    /// Answers a request of another node.
    fn answer_request(self: &Arc<Self>, message: &Message) {
        let Some(request) = parse::<NodeRequest>(message) else {
            return;
        };
        match request {
            NodeRequest::Environments => self.reply_all(message, self.local.local_environments()),
            NodeRequest::Streams(environment) => {
                let streams = self.local.local_streams(environment.as_deref());
                self.reply_all(message, streams);
            }
            NodeRequest::Disconnect { target, reason } => {
                let ended = self.disconnect_here(&target.into(), &EndReason::parse(&reason));
                self.reply_all(message, vec![ended]);
            }
            NodeRequest::Drain => {
                drop(self.local.drain(&self.node));
                self.reply_all(message, vec![true]);
            }
        }
    }

    fn reply_all<T: Serialize>(&self, message: &Message, mut items: Vec<T>) {
        loop {
            let rest = items.split_off(items.len().min(MAX_ITEMS_PER_MESSAGE));
            let more = !rest.is_empty();
            self.reply(message, &NodeResponse { items, more });
            if !more {
                return;
            }
            items = rest;
        }
    }

    /// Sends a request to all other nodes. The result omits nodes that do not respond in time.
    pub(crate) async fn request_all<T: DeserializeOwned>(&self, request: &NodeRequest) -> Vec<T> {
        let others = self.state().rules.others();
        if others.is_empty() {
            return Vec::new();
        }
        let mut sent = Vec::new();
        let text = Bytes::from(serde_json::to_vec(request).unwrap_or_default());
        for node in others {
            let text = text.clone();
            sent.push(async move { self.request_node(&node, text).await });
        }
        let answers = futures_util::future::join_all(sent).await;
        answers.into_iter().flatten().flatten().collect()
    }

    /// Sends a request to one node. Returns `None` if the node does not respond.
    pub(crate) async fn request_node<T: DeserializeOwned>(
        &self,
        node: &str,
        request: Bytes,
    ) -> Option<Vec<T>> {
        let gather = async {
            let inbox = self.client.new_inbox();
            let mut answers = self.client.subscribe(inbox.clone()).await.ok()?;
            let subject = self.node_subject(node, "ask");
            let sent = self
                .client
                .publish_with_reply(subject, inbox, request)
                .await;
            sent.ok()?;
            let mut items = Vec::new();
            while let Some(message) = answers.next().await {
                // NATS answers with an empty body if the node has no subscription.
                let part = parse::<NodeResponse<T>>(&message)?;
                items.extend(part.items);
                if !part.more {
                    return Some(items);
                }
            }
            None
        };
        tokio::time::timeout(ALL_NODES_TIMEOUT, gather)
            .await
            .ok()
            .flatten()
    }
}

impl ClusterShared {
    /// Publishes an event of this node to the other nodes, unless too much is queued.
    pub(crate) fn broadcast_event(&self, admin_event: &AdminEvent) {
        if self.outbox.full().is_some() {
            tracing::debug!(
                event = admin_event.event,
                "dropped an event: the queue for NATS is full"
            );
            return;
        }
        let text = serde_json::to_vec(admin_event).unwrap_or_default();
        self.outbox.send(self.events_subject(), None, text.into());
    }

    /// Subscribes to the events of other nodes.
    pub(crate) fn subscribe_events(
        self: &Arc<Self>,
        publish: Box<dyn Fn(AdminEvent) + Send + Sync>,
    ) -> EventSubscription {
        let shared = Arc::clone(self);
        EventSubscription::new(tokio::spawn(async move {
            let mut announced = match shared.client.subscribe(shared.events_subject()).await {
                Ok(announced) => announced,
                Err(error) => {
                    tracing::warn!(%error, "cannot subscribe to the events of other nodes");
                    return;
                }
            };
            // The callback must not wait, so that messages do not accumulate.
            while let Some(message) = announced.next().await {
                match parse_event(&message.payload) {
                    // Subscribers of this node already have this node's own events.
                    Some(admin_event) if admin_event.data["node"] == *shared.node => {}
                    Some(admin_event) => publish(admin_event),
                    None => tracing::debug!(
                        bytes = message.payload.len(),
                        "ignored an unknown event of another node"
                    ),
                }
            }
        }))
    }
}

/// Parses an event. Returns `None` if it is too long or invalid.
fn parse_event(message: &[u8]) -> Option<AdminEvent> {
    if message.len() > MAX_EVENT_BYTES {
        return None;
    }
    let admin_event: AdminEvent = serde_json::from_slice(message).ok()?;
    let named = |byte: u8| byte.is_ascii_lowercase() || byte == b'_';
    let event = &admin_event.event;
    let sensible = (1..=32).contains(&event.len())
        && event.bytes().all(named)
        && is_tenant(&admin_event.tenant)
        && admin_event.data.get("node").is_some_and(Value::is_string);
    sensible.then_some(admin_event)
}

fn parse<T: DeserializeOwned>(message: &Message) -> Option<T> {
    serde_json::from_slice(&message.payload).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_event_rejects_invalid_and_oversized_events() {
        let good = r#"{"event":"attach","tenant":"acme","data":{"node":"n-1","role":"x"}}"#;
        let parsed = parse_event(good.as_bytes()).unwrap();
        assert_eq!(
            (&*parsed.event, &*parsed.tenant, &parsed.data["role"]),
            ("attach", "acme", &Value::from("x"))
        );
        let long = good.replace("\"x\"", &format!("{:?}", "x".repeat(MAX_EVENT_BYTES)));
        for bad in [
            "",
            "hello",
            "{}",
            &good.replace("attach", ""),
            &good.replace("attach", "a\\ndata: b"),
            &good.replace("acme", "*"),
            &good.replace("acme", "a b"),
            &good.replace("node", "edon"),
            &good.replace(r#"{"node":"n-1","role":"x"}"#, "7"),
            &long,
        ] {
            assert_eq!(parse_event(bad.as_bytes()), None, "{bad:.60}");
        }
    }
}
