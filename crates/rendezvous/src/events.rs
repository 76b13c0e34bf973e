//! What happens at a meeting point, for those who watch: `GET /events`, server-sent events.
//!
//! Owns who watches and what waits for each of them, which is bounded: whoever reads too slowly is
//! told how much it has missed. Nobody waits for a watcher. What happens at other nodes is listened
//! to while anybody watches here.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::sync::Arc;

use exec_server_sync::{Mutex, MutexGuard};
use serde_json::Value;
use tokio::sync::Notify;

use crate::router::{Happening, Hearing, Router};

/// Who can watch at one time.
const MAX_WATCHERS: usize = 64;

/// Events that wait for one watcher.
const MAX_WAITING: usize = 1024;

/// Everybody who watches.
#[derive(Debug, Default)]
pub(crate) struct Events {
    watchers: Mutex<Watchers>,
}

/// Under the lock; nobody waits while holding it.
#[derive(Debug, Default)]
struct Watchers {
    all: Vec<Arc<Watcher>>,
    /// While there are any, and other nodes.
    hearing: Option<Hearing>,
}

#[derive(Debug)]
struct Watcher {
    /// Whose events; `None` for all.
    tenant: Option<Arc<str>>,
    waiting: Mutex<Waiting>,
    filled: Notify,
}

#[derive(Debug, Default)]
struct Waiting {
    events: VecDeque<Arc<str>>,
    /// The number of the first of them. Each watcher counts for itself: how much happens at other
    /// tenants is not for everybody.
    first: u64,
    /// Not told yet.
    dropped: u64,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

impl Events {
    /// Tells all who may know.
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
        // JSON has no line breaks of its own, so that one line holds it.
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
                // The oldest goes: what is the case now matters more.
                waiting.events.pop_front();
                waiting.first += 1;
                waiting.dropped += 1;
            }
            waiting.events.push_back(Arc::clone(&text));
            drop(waiting);
            watcher.filled.notify_one();
        }
    }

    /// Begins to watch one tenant, or all, here and at the nodes that the router knows; `None` if too
    /// many do.
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

/// One who watches, until dropped.
#[derive(Debug)]
pub(crate) struct Watching {
    events: Arc<Events>,
    watcher: Arc<Watcher>,
}

impl Watching {
    /// What has happened since it was last asked, as text to be sent. Cancel safe.
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
        // What it says of its tenant does not count.
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
