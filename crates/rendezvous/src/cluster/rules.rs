//! Lease, claim and fencing rules of a cluster of nodes, without IO and without a clock. They
//! decide which node may accept connections, which node owns an environment, and which node is
//! treated as dead.
//!
//! Nodes agree through one log. Every write gets a number, the *revision*, and every node
//! eventually sees all writes in that order. Two kinds of entries matter here, and of registrations
//! only their revision:
//!
//! ```text
//!  lease   node → number of its renewals       written by the node itself, about once a second
//!  claim   environment → node, registration    written by the node to which the executor connected
//! ```
//!
//! - **Fresh view.** A node that reads its own lease back from the log has seen everything written
//!   before it sent that lease. It accepts connections only if it sent such a lease within the last
//!   [`Timing::own`]. A node that was paused or disconnected therefore catches up before it acts.
//! - **Newest claim wins.** The revision of a claim is its epoch. A node that sees a newer claim than
//!   its own closes the executor's socket. A claim for an older registration never overwrites one for
//!   a newer registration.
//! - **Silent nodes are dead**, as seen by a node with a fresh view: a node treats another as dead
//!   when that lease was not renewed for [`Timing::others`] and its own view was fresh all that time.
//!
//! A clock is only compared with itself, so wrong clocks do no harm. Only clock drift matters:
//! `others` is longer than `own` by more than the clocks can drift apart in that time.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// Timing of leases.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Interval between two renewals of a node's own lease.
    pub renew: Duration,
    /// Maximum age of the node's own view while it accepts connections.
    pub own: Duration,
    /// How long another node's lease may stay without renewal before the node is treated as dead.
    pub others: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            renew: Duration::from_millis(700),
            own: Duration::from_secs(3),
            others: Duration::from_secs(5),
        }
    }
}

/// Record of the node that owns an environment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// The node that has the executor's socket.
    pub node: Arc<str>,
    /// The registration of the executor.
    pub registration: Arc<str>,
    /// The revision of that registration.
    pub registered: u64,
}

impl Claim {
    /// Whether this claim may overwrite `current`.
    pub fn may_follow(&self, current: Option<&Self>) -> bool {
        current.is_none_or(|current| current.registered <= self.registered)
    }
}

/// Where the executor of an environment is connected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExecutorRoute {
    /// This node's view is too old to decide.
    Unknown,
    /// The executor is connected to this node.
    Local {
        /// Revision of the claim.
        epoch: u64,
    },
    /// The executor is connected to another node.
    Remote {
        /// The claim, which names the node.
        claim: Claim,
        /// Revision of the claim.
        epoch: u64,
    },
    /// The executor is not connected to any node.
    Unattached {
        /// Time at which this node saw the executor disconnect; `None` if it did not.
        since: Option<Instant>,
    },
}

/// Effect of a new claim in the log on this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaimChange {
    /// No socket has to be opened or closed.
    Unchanged,
    /// This node's claim was replaced by a newer one: its executor socket must close.
    Fenced,
    /// The executor moved to another node: connections to the previous node must close.
    Moved,
}

#[derive(Debug)]
struct Member {
    revision: u64,
    /// When the last renewal of its lease was seen.
    seen: Instant,
    /// Whether the lease has expired.
    dead: bool,
}

#[derive(Debug)]
struct KnownClaim {
    revision: u64,
    claim: Option<Claim>,
    /// The node to which the executor was last connected.
    last: Option<Arc<str>>,
    /// When the executor's claim was seen to change.
    since: Instant,
}

/// A claim written by this node.
#[derive(Debug, Clone, Copy)]
struct OwnClaim {
    /// Number of the executor's socket.
    socket: u64,
    revision: u64,
}

/// State of the cluster as one node knows it, with the decisions that follow from it.
#[derive(Debug)]
pub struct ClusterRules {
    node: Arc<str>,
    timing: Timing,
    /// Renewals sent but not yet read back: their numbers and send times.
    sent: Vec<(u64, Instant)>,
    /// Send time of the newest renewal that was read back.
    fresh: Option<Instant>,
    members: HashMap<Arc<str>, Member>,
    claims: HashMap<Arc<str>, KnownClaim>,
    own: HashMap<Arc<str>, OwnClaim>,
}

impl ClusterRules {
    /// Creates the state of a node that has read nothing yet.
    pub fn new(node: Arc<str>, timing: Timing) -> Self {
        Self {
            node,
            timing,
            sent: Vec::new(),
            fresh: None,
            members: HashMap::new(),
            claims: HashMap::new(),
            own: HashMap::new(),
        }
    }

    /// Name of this node.
    pub fn node(&self) -> &Arc<str> {
        &self.node
    }

    /// Records that a renewal of this node's lease is about to be sent.
    pub fn record_renewal_sent(&mut self, beat: u64, now: Instant) {
        /// Limit of recorded renewals: an older one would not make the view fresh anyway.
        const OUTSTANDING: usize = 64;
        if self.sent.len() >= OUTSTANDING {
            self.sent.remove(0);
        }
        self.sent.push((beat, now));
    }

    /// Records that this node's own lease was read from the log, and with it everything written
    /// before.
    pub fn record_renewal_read(&mut self, beat: u64, now: Instant) {
        let Some(at) = self
            .sent
            .iter()
            .find(|sent| sent.0 == beat)
            .map(|sent| sent.1)
        else {
            return;
        };
        self.sent.retain(|sent| sent.0 > beat);
        if !self.is_fresh(now) {
            // This node's view was not fresh for a while, so the silence of other nodes does not
            // count yet.
            for member in self.members.values_mut() {
                member.seen = now;
            }
        }
        self.fresh = Some(self.fresh.map_or(at, |fresh| fresh.max(at)));
    }

    /// Whether this node's view is new enough to act on.
    pub fn is_fresh(&self, now: Instant) -> bool {
        self.fresh
            .is_some_and(|at| now.saturating_duration_since(at) < self.timing.own)
    }

    /// Records that the lease of another node was renewed or removed.
    pub fn lease(&mut self, node: &Arc<str>, revision: u64, gone: bool, now: Instant) {
        if *node == self.node {
            return;
        }
        let known = self.members.get(node).map_or(0, |member| member.revision);
        if revision <= known {
            return;
        }
        if gone {
            self.members.remove(node);
            return;
        }
        let member = Member {
            revision,
            seen: now,
            dead: false,
        };
        self.members.insert(Arc::clone(node), member);
    }

    /// Whether a node is not treated as dead.
    pub fn is_alive(&self, node: &str) -> bool {
        *node == *self.node || self.members.get(node).is_some_and(|member| !member.dead)
    }

    /// The other nodes that are alive.
    pub fn others(&self) -> Vec<Arc<str>> {
        let alive = self.members.iter().filter(|(_, member)| !member.dead);
        alive.map(|(node, _)| Arc::clone(node)).collect()
    }

    /// Marks nodes with expired leases as dead. Returns those that were alive before.
    pub fn expire_members(&mut self, now: Instant) -> Vec<Arc<str>> {
        if !self.is_fresh(now) {
            return Vec::new();
        }
        let mut expired = Vec::new();
        for (node, member) in &mut self.members {
            let silent = now.saturating_duration_since(member.seen) >= self.timing.others;
            if silent && !member.dead {
                member.dead = true;
                expired.push(Arc::clone(node));
            }
        }
        expired
    }

    /// Forgets nodes that have been dead for `after`. Returns their names and lease revisions, so
    /// that the leases can be deleted.
    pub fn remove_dead_members(&mut self, now: Instant, after: Duration) -> Vec<(Arc<str>, u64)> {
        let old =
            |member: &Member| member.dead && now.saturating_duration_since(member.seen) >= after;
        let removed: Vec<_> = self
            .members
            .iter()
            .filter(|(_, member)| old(member))
            .map(|(node, member)| (Arc::clone(node), member.revision))
            .collect();
        for (node, _) in &removed {
            self.members.remove(node);
        }
        removed
    }

    /// Records that a claim was written or removed in the log.
    pub fn claim(
        &mut self,
        environment: &Arc<str>,
        revision: u64,
        claim: Option<Claim>,
        now: Instant,
    ) -> ClaimChange {
        let before = self.claims.get(environment);
        if before.is_some_and(|before| before.revision >= revision) {
            return ClaimChange::Unchanged;
        }
        // An executor may reconnect to the same node, which keeps its streams for a while.
        let last = before.and_then(|before| before.last.clone());
        let node = claim.as_ref().map(|claim| Arc::clone(&claim.node));
        let moved = node.is_some() && last.is_some() && last != node;
        let known = KnownClaim {
            revision,
            claim,
            last: node.or(last),
            since: now,
        };
        let ours = known.claim.as_ref().is_some_and(|it| it.node == self.node);
        self.claims.insert(Arc::clone(environment), known);
        if ours {
            // This node wrote the claim itself; the watch reports it before the write returns.
            return ClaimChange::Unchanged;
        }
        match self.own.get(environment) {
            Some(own) if own.revision < revision => {
                self.own.remove(environment);
                ClaimChange::Fenced
            }
            _ if moved => ClaimChange::Moved,
            _ => ClaimChange::Unchanged,
        }
    }

    /// Records that this node's claim was written. Returns `false` if a newer claim is already
    /// known, which makes this one void.
    pub fn claimed(
        &mut self,
        environment: &Arc<str>,
        socket: u64,
        revision: u64,
        claim: Claim,
        now: Instant,
    ) -> bool {
        let newer = self
            .claims
            .get(environment)
            .is_some_and(|known| known.revision > revision);
        if newer {
            return false;
        }
        let known = KnownClaim {
            revision,
            last: Some(Arc::clone(&claim.node)),
            claim: Some(claim),
            since: now,
        };
        self.claims.insert(Arc::clone(environment), known);
        let own = OwnClaim { socket, revision };
        self.own.insert(Arc::clone(environment), own);
        true
    }

    /// Records that the executor's socket closed. Returns the revision of the claim to remove if it
    /// still belongs to this node.
    pub fn release(&mut self, environment: &str, socket: u64) -> Option<u64> {
        let own = self.own.get(environment).copied()?;
        if own.socket != socket {
            return None;
        }
        self.own.remove(environment);
        Some(own.revision)
    }

    /// Whether this node still owns the claim with this epoch, so that a stream addressed to it may
    /// open.
    pub fn holds(&self, environment: &str, epoch: u64, now: Instant) -> bool {
        self.is_fresh(now)
            && self
                .own
                .get(environment)
                .is_some_and(|own| own.revision == epoch)
    }

    /// Number of the socket behind this node's claim on an environment.
    pub fn own_socket(&self, environment: &str) -> Option<u64> {
        self.own.get(environment).map(|own| own.socket)
    }

    /// Where to send streams for an environment.
    pub fn route(&self, environment: &str, now: Instant) -> ExecutorRoute {
        if !self.is_fresh(now) {
            return ExecutorRoute::Unknown;
        }
        if let Some(own) = self.own.get(environment) {
            let epoch = own.revision;
            return ExecutorRoute::Local { epoch };
        }
        let Some(known) = self.claims.get(environment) else {
            return ExecutorRoute::Unattached { since: None };
        };
        match &known.claim {
            Some(claim) if claim.node != self.node && self.is_alive(&claim.node) => {
                ExecutorRoute::Remote {
                    claim: claim.clone(),
                    epoch: known.revision,
                }
            }
            _ => ExecutorRoute::Unattached {
                since: Some(known.since),
            },
        }
    }

    /// All known claims, of this node and of others.
    pub fn claims(&self) -> impl Iterator<Item = (&Arc<str>, &Claim)> {
        let claims = self.claims.iter();
        claims.filter_map(|(environment, known)| Some((environment, known.claim.as_ref()?)))
    }

    /// Discards the state of the log because a new log with small revision numbers has replaced it.
    /// Connected sockets stay. Returns the claims that this node must write again; each is valid
    /// again after it was written.
    pub fn reset(&mut self) -> Vec<(Arc<str>, u64)> {
        self.sent.clear();
        self.fresh = None;
        self.members.clear();
        self.claims.clear();
        let own = std::mem::take(&mut self.own).into_iter();
        own.map(|(environment, own)| (environment, own.socket))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(node: &str, registered: u64) -> Claim {
        Claim {
            node: node.into(),
            registration: "r".into(),
            registered,
        }
    }

    #[test]
    fn view_is_stale_when_the_own_lease_was_not_read_back_in_time() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut rules = ClusterRules::new("a".into(), Timing::default());
        let environment: Arc<str> = "e".into();
        assert!(rules.claimed(&environment, 1, 5, claim("a", 1), at(0)));
        assert_eq!(rules.route("e", at(0)), ExecutorRoute::Unknown);
        rules.record_renewal_sent(1, at(0));
        assert!(!rules.holds("e", 5, at(0)), "sent is not seen");
        rules.record_renewal_read(1, at(10));
        assert!(rules.holds("e", 5, at(2999)) && !rules.holds("e", 4, at(2999)));
        // The lease counts from the time it was sent, not from the time it was read back.
        assert!(!rules.holds("e", 5, at(3000)));
        assert_eq!(rules.route("e", at(3000)), ExecutorRoute::Unknown);
        rules.record_renewal_sent(2, at(20_000));
        rules.record_renewal_read(2, at(20_001));
        assert_eq!(
            rules.route("e", at(20_002)),
            ExecutorRoute::Local { epoch: 5 }
        );
        assert_eq!(
            rules.claim(&environment, 9, Some(claim("b", 1)), at(20_003)),
            ClaimChange::Fenced
        );
        assert!(!rules.holds("e", 5, at(20_004)));
        assert_eq!(rules.release("e", 1), None, "it is not ours to remove");
    }

    #[test]
    fn silent_members_expire_only_while_the_own_view_is_fresh() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut rules = ClusterRules::new("a".into(), Timing::default());
        let (environment, other): (Arc<str>, Arc<str>) = ("e".into(), "b".into());
        rules.record_renewal_sent(1, at(0));
        rules.record_renewal_read(1, at(0));
        rules.lease(&other, 3, false, at(0));
        rules.claim(&environment, 4, Some(claim("b", 1)), at(0));
        assert!(matches!(
            rules.route("e", at(1)),
            ExecutorRoute::Remote { epoch: 4, .. }
        ));
        // This node was disconnected for a minute, so the other nodes' silence does not count.
        assert_eq!(rules.expire_members(at(60_000)), [] as [Arc<str>; 0]);
        rules.record_renewal_sent(2, at(60_000));
        rules.record_renewal_read(2, at(60_001));
        assert_eq!(rules.expire_members(at(60_002)), [] as [Arc<str>; 0]);
        for beat in 0..8 {
            let now = at(60_500 + beat * 600);
            rules.record_renewal_sent(3 + beat, now);
            rules.record_renewal_read(3 + beat, now);
            assert!(rules.is_alive("b"));
        }
        assert_eq!(rules.expire_members(at(65_100)), [Arc::clone(&other)]);
        assert_eq!(
            rules.expire_members(at(65_101)),
            [] as [Arc<str>; 0],
            "reported once"
        );
        assert!(matches!(
            rules.route("e", at(65_102)),
            ExecutorRoute::Unattached { since: Some(_) }
        ));
        // An old lease entry does not revive the node; a new one does.
        rules.lease(&other, 3, false, at(65_200));
        assert!(!rules.is_alive("b"));
        rules.lease(&other, 10, false, at(65_200));
        assert!(rules.is_alive("b"));
    }

    #[test]
    fn claim_by_another_node_after_a_detach_is_reported_as_moved() {
        let now = Instant::now();
        let mut rules = ClusterRules::new("a".into(), Timing::default());
        let environment: Arc<str> = "e".into();
        let mut see = |revision, claim| rules.claim(&environment, revision, claim, now);
        assert_eq!(see(1, Some(claim("b", 1))), ClaimChange::Unchanged);
        assert_eq!(see(2, None), ClaimChange::Unchanged);
        assert_eq!(
            see(3, Some(claim("b", 1))),
            ClaimChange::Unchanged,
            "reattached to the same node"
        );
        assert_eq!(see(4, None), ClaimChange::Unchanged);
        assert_eq!(see(5, Some(claim("c", 1))), ClaimChange::Moved);
        assert_eq!(
            see(4, Some(claim("b", 1))),
            ClaimChange::Unchanged,
            "outdated entry"
        );
    }

    #[test]
    fn own_claim_read_back_from_the_log_changes_nothing() {
        let now = Instant::now();
        let mut rules = ClusterRules::new("a".into(), Timing::default());
        let environment: Arc<str> = "e".into();
        rules.claim(&environment, 1, Some(claim("b", 1)), now);
        // The watch reports the claim before the write returns.
        let seen = rules.claim(&environment, 2, Some(claim("a", 1)), now);
        assert_eq!(seen, ClaimChange::Unchanged);
        assert!(rules.claimed(&environment, 1, 2, claim("a", 1), now));
        let again = rules.claim(&environment, 3, Some(claim("a", 1)), now);
        assert_eq!(
            (again, rules.own_socket("e")),
            (ClaimChange::Unchanged, Some(1))
        );
        assert!(rules.claimed(&environment, 2, 3, claim("a", 1), now));
        assert_eq!(rules.own_socket("e"), Some(2));
        let removed = rules.claim(&environment, 4, None, now);
        assert_eq!(
            removed,
            ClaimChange::Fenced,
            "another node replaced the claim"
        );
    }

    #[test]
    fn claim_for_an_older_registration_cannot_overwrite_a_newer_one() {
        assert!(claim("a", 5).may_follow(None));
        assert!(claim("a", 5).may_follow(Some(&claim("b", 5))));
        assert!(!claim("a", 4).may_follow(Some(&claim("b", 5))));
    }

    #[test]
    fn reset_discards_claims_of_the_old_log_and_keeps_own_sockets() {
        let now = Instant::now();
        let mut rules = ClusterRules::new("a".into(), Timing::default());
        let environment: Arc<str> = "e".into();
        assert!(rules.claimed(&environment, 7, 900, claim("a", 1), now));
        assert_eq!(rules.reset(), [(Arc::clone(&environment), 7)]);
        assert!(rules.claimed(&environment, 7, 2, claim("a", 1), now));
        assert_eq!(rules.release("e", 7), Some(2));
    }
}
