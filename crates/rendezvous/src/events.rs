//! Event stream for administrators: `GET /events`, server-sent events.
//!
//! Owns the subscribers and a bounded queue for each. A subscriber that reads too slowly loses the
//! oldest events and receives their number. Publishing never waits for a subscriber. Events of
//! other nodes are received while this node has a subscriber.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::sync::Arc;

use exec_server_sync::{Mutex, MutexGuard};
use serde_json::Value;
use tokio::sync::Notify;

use crate::router::{AdminEvent, EventSubscription, Router};

/// Maximum number of subscribers at a time.
const MAX_SUBSCRIBERS: usize = 64;

/// Maximum number of queued events of one subscriber.
const MAX_QUEUED_EVENTS: usize = 1024;

/// Event bus of this node.
#[derive(Debug, Default)]
pub(crate) struct Events {
    subscribers: Mutex<Subscribers>,
}

/// Subscribers of this node; the lock is never held across an await.
#[derive(Debug, Default)]
struct Subscribers {
    all: Vec<Arc<EventSubscriber>>,
    /// Set while this node has subscribers and the cluster has other nodes.
    remote_events: Option<EventSubscription>,
}

#[derive(Debug)]
struct EventSubscriber {
    /// Tenant whose events the subscriber receives; `None` for all.
    tenant: Option<Arc<str>>,
    queue: Mutex<EventQueue>,
    filled: Notify,
}

#[derive(Debug, Default)]
struct EventQueue {
    events: VecDeque<Arc<str>>,
    /// Number of the first queued event. Each subscriber has separate numbers, because a common
    /// sequence would reveal the activity of other tenants.
    first: u64,
    /// Number of dropped events not yet reported.
    dropped: u64,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

impl Events {
    /// Sends an event to all subscribers that may see it.
    pub(crate) fn publish(&self, admin_event: AdminEvent) {
        let AdminEvent {
            event,
            tenant,
            mut data,
        } = admin_event;
        let subscribers = locked(&self.subscribers);
        if subscribers.all.is_empty() {
            return;
        }
        data.insert("tenant".to_owned(), Value::from(tenant.as_str()));
        let data = Value::Object(data);
        // JSON contains no raw line breaks, so the event fits on one line.
        let text: Arc<str> = format!("event: {event}\ndata: {data}\n\n").into();
        for subscriber in &subscribers.all {
            if subscriber
                .tenant
                .as_ref()
                .is_some_and(|wanted| **wanted != *tenant)
            {
                continue;
            }
            let mut queue = locked(&subscriber.queue);
            if queue.events.len() >= MAX_QUEUED_EVENTS {
                // Drops the oldest event, because the current state matters more.
                queue.events.pop_front();
                queue.first += 1;
                queue.dropped += 1;
            }
            queue.events.push_back(Arc::clone(&text));
            drop(queue);
            subscriber.filled.notify_one();
        }
    }

    /// Subscribes to the events of one tenant, or of all, on this node and on other nodes of the
    /// router. Returns `None` if the limit of subscribers is reached.
    pub(crate) fn subscribe(
        self: &Arc<Self>,
        tenant: Option<Arc<str>>,
        router: &dyn Router,
    ) -> Option<LocalEventSubscription> {
        let mut subscribers = locked(&self.subscribers);
        if subscribers.all.len() >= MAX_SUBSCRIBERS {
            return None;
        }
        if subscribers.remote_events.is_none() {
            let events = Arc::clone(self);
            subscribers.remote_events =
                router.subscribe_events(Box::new(move |admin_event| events.publish(admin_event)));
        }
        let subscriber = Arc::new(EventSubscriber {
            tenant,
            queue: Mutex::default(),
            filled: Notify::new(),
        });
        subscribers.all.push(Arc::clone(&subscriber));
        Some(LocalEventSubscription {
            events: Arc::clone(self),
            subscriber,
        })
    }
}

/// Subscription to events, until dropped.
#[derive(Debug)]
pub(crate) struct LocalEventSubscription {
    events: Arc<Events>,
    subscriber: Arc<EventSubscriber>,
}

impl LocalEventSubscription {
    /// Returns the events since the last call in the format of server-sent events. Cancel safe.
    pub(crate) async fn next(&self) -> String {
        loop {
            {
                let mut queue = locked(&self.subscriber.queue);
                if !queue.events.is_empty() {
                    let mut text = String::new();
                    let dropped = std::mem::take(&mut queue.dropped);
                    if dropped > 0 {
                        text = format!("event: dropped\ndata: {{\"dropped\":{dropped}}}\n\n");
                    }
                    for event in std::mem::take(&mut queue.events) {
                        let _ = write!(text, "id: {}\n{event}", queue.first);
                        queue.first += 1;
                    }
                    return text;
                }
            }
            self.subscriber.filled.notified().await;
        }
    }
}

impl Drop for LocalEventSubscription {
    fn drop(&mut self) {
        let subscriber = &self.subscriber;
        let mut subscribers = locked(&self.events.subscribers);
        subscribers
            .all
            .retain(|other| !Arc::ptr_eq(other, subscriber));
        if subscribers.all.is_empty() {
            subscribers.remote_events = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::router::local::{LocalRouter, RouterLimits};

    fn router() -> LocalRouter {
        LocalRouter::new(RouterLimits::default(), Arc::default())
    }

    fn admin_event(event: &str, tenant: &str, data: Value) -> AdminEvent {
        AdminEvent {
            event: event.to_owned(),
            tenant: tenant.to_owned(),
            data: data.as_object().unwrap().clone(),
        }
    }

    #[tokio::test]
    async fn subscriber_of_a_tenant_receives_only_its_events() {
        let events = Arc::new(Events::default());
        let all = events.subscribe(None, &router()).unwrap();
        let acme = events.subscribe(Some("acme".into()), &router()).unwrap();
        let other = json!({"environment": "a\nb"});
        events.publish(admin_event("attach", "other-one", other));
        // The tenant in the data of the event is ignored.
        let own = json!({"harness": "token:x", "tenant": "b"});
        events.publish(admin_event("revoke", "acme", own));
        let expected =
            "id: 0\nevent: revoke\ndata: {\"harness\":\"token:x\",\"tenant\":\"acme\"}\n\n";
        assert_eq!(acme.next().await, expected);
        let text = all.next().await;
        assert_eq!(text.matches("\n\n").count(), 2, "{text}");
        assert!(text.contains(r#""environment":"a\nb""#), "{text}");
    }

    #[tokio::test]
    async fn slow_subscriber_receives_the_number_of_dropped_events() {
        let events = Arc::new(Events::default());
        let slow = events.subscribe(None, &router()).unwrap();
        for _ in 0..MAX_QUEUED_EVENTS + 7 {
            events.publish(admin_event("attach", "default", json!({})));
        }
        let text = slow.next().await;
        assert!(text.starts_with("event: dropped\ndata: {\"dropped\":7}\n\n"));
        assert_eq!(text.matches("event: attach").count(), MAX_QUEUED_EVENTS);
        assert!(text.contains("id: 7\n") && !text.contains("id: 6\n"));
        events.publish(admin_event("attach", "default", json!({})));
        assert!(!slow.next().await.contains("dropped"));
    }

    #[test]
    fn subscribe_fails_at_the_limit_until_a_subscriber_leaves() {
        let events = Arc::new(Events::default());
        let subscribe = || events.subscribe(None, &router());
        let all: Vec<_> = (0..MAX_SUBSCRIBERS).map(|_| subscribe()).collect();
        assert!(all.iter().all(Option::is_some));
        assert!(subscribe().is_none());
        drop(all);
        assert!(subscribe().is_some());
    }
}
