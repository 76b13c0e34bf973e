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

use crate::router::{Happening, Hearing, Router};

/// Maximum number of subscribers at a time.
const MAX_WATCHERS: usize = 64;

/// Maximum number of queued events of one subscriber.
const MAX_WAITING: usize = 1024;

/// Event bus of this node.
#[derive(Debug, Default)]
pub(crate) struct Events {
    watchers: Mutex<Watchers>,
}

/// Subscribers of this node; the lock is never held across an await.
#[derive(Debug, Default)]
struct Watchers {
    all: Vec<Arc<Watcher>>,
    /// Set while this node has subscribers and the cluster has other nodes.
    hearing: Option<Hearing>,
}

#[derive(Debug)]
struct Watcher {
    /// Tenant whose events the subscriber receives; `None` for all.
    tenant: Option<Arc<str>>,
    waiting: Mutex<Waiting>,
    filled: Notify,
}

#[derive(Debug, Default)]
struct Waiting {
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
    pub(crate) fn tell(&self, happening: Happening) {
        let Happening {
            event,
            tenant,
            mut data,
        } = happening;
        let watchers = locked(&self.watchers);
        if watchers.all.is_empty() {
            return;
        }
        data.insert("tenant".to_owned(), Value::from(tenant.as_str()));
        let data = Value::Object(data);
        // JSON contains no raw line breaks, so the event fits on one line.
        let text: Arc<str> = format!("event: {event}\ndata: {data}\n\n").into();
        for watcher in &watchers.all {
            if watcher
                .tenant
                .as_ref()
                .is_some_and(|watched| **watched != *tenant)
            {
                continue;
            }
            let mut waiting = locked(&watcher.waiting);
            if waiting.events.len() >= MAX_WAITING {
                // Drops the oldest event, because the current state matters more.
                waiting.events.pop_front();
                waiting.first += 1;
                waiting.dropped += 1;
            }
            waiting.events.push_back(Arc::clone(&text));
            drop(waiting);
            watcher.filled.notify_one();
        }
    }

    /// Subscribes to the events of one tenant, or of all, on this node and on other nodes of the
    /// router. Returns `None` if the limit of subscribers is reached.
    pub(crate) fn watch(
        self: &Arc<Self>,
        tenant: Option<Arc<str>>,
        router: &dyn Router,
    ) -> Option<Watching> {
        let mut watchers = locked(&self.watchers);
        if watchers.all.len() >= MAX_WATCHERS {
            return None;
        }
        if watchers.hearing.is_none() {
            let events = Arc::clone(self);
            watchers.hearing = router.hear(Box::new(move |happening| events.tell(happening)));
        }
        let watcher = Arc::new(Watcher {
            tenant,
            waiting: Mutex::default(),
            filled: Notify::new(),
        });
        watchers.all.push(Arc::clone(&watcher));
        Some(Watching {
            events: Arc::clone(self),
            watcher,
        })
    }
}

/// Subscription to events, until dropped.
#[derive(Debug)]
pub(crate) struct Watching {
    events: Arc<Events>,
    watcher: Arc<Watcher>,
}

impl Watching {
    /// Returns the events since the last call in the format of server-sent events. Cancel safe.
    pub(crate) async fn next(&self) -> String {
        loop {
            {
                let mut waiting = locked(&self.watcher.waiting);
                if !waiting.events.is_empty() {
                    let mut text = String::new();
                    let dropped = std::mem::take(&mut waiting.dropped);
                    if dropped > 0 {
                        text = format!("event: dropped\ndata: {{\"dropped\":{dropped}}}\n\n");
                    }
                    for event in std::mem::take(&mut waiting.events) {
                        let _ = write!(text, "id: {}\n{event}", waiting.first);
                        waiting.first += 1;
                    }
                    return text;
                }
            }
            self.watcher.filled.notified().await;
        }
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        let watcher = &self.watcher;
        let mut watchers = locked(&self.events.watchers);
        watchers.all.retain(|other| !Arc::ptr_eq(other, watcher));
        if watchers.all.is_empty() {
            watchers.hearing = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::router::local::{Local, RouterLimits};

    fn router() -> Local {
        Local::new(RouterLimits::default(), Arc::default())
    }

    fn happening(event: &str, tenant: &str, data: Value) -> Happening {
        Happening {
            event: event.to_owned(),
            tenant: tenant.to_owned(),
            data: data.as_object().unwrap().clone(),
        }
    }

    #[tokio::test]
    async fn watchers_hear_of_their_tenant_alone() {
        let events = Arc::new(Events::default());
        let all = events.watch(None, &router()).unwrap();
        let acme = events.watch(Some("acme".into()), &router()).unwrap();
        let other = json!({"environment": "a\nb"});
        events.tell(happening("attach", "other-one", other));
        // The tenant in the data of the event is ignored.
        let own = json!({"harness": "token:x", "tenant": "b"});
        events.tell(happening("revoke", "acme", own));
        let expected =
            "id: 0\nevent: revoke\ndata: {\"harness\":\"token:x\",\"tenant\":\"acme\"}\n\n";
        assert_eq!(acme.next().await, expected);
        let text = all.next().await;
        assert_eq!(text.matches("\n\n").count(), 2, "{text}");
        assert!(text.contains(r#""environment":"a\nb""#), "{text}");
    }

    #[tokio::test]
    async fn the_slow_are_told_what_they_have_missed() {
        let events = Arc::new(Events::default());
        let slow = events.watch(None, &router()).unwrap();
        for _ in 0..MAX_WAITING + 7 {
            events.tell(happening("attach", "default", json!({})));
        }
        let text = slow.next().await;
        assert!(text.starts_with("event: dropped\ndata: {\"dropped\":7}\n\n"));
        assert_eq!(text.matches("event: attach").count(), MAX_WAITING);
        assert!(text.contains("id: 7\n") && !text.contains("id: 6\n"));
        events.tell(happening("attach", "default", json!({})));
        assert!(!slow.next().await.contains("dropped"));
    }

    #[test]
    fn not_everybody_can_watch() {
        let events = Arc::new(Events::default());
        let watch = || events.watch(None, &router());
        let all: Vec<_> = (0..MAX_WATCHERS).map(|_| watch()).collect();
        assert!(all.iter().all(Option::is_some));
        assert!(watch().is_none());
        drop(all);
        assert!(watch().is_some());
    }
}
