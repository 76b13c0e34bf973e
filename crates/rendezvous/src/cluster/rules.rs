//! Who may take somebody in, who stands for which environment, and who is believed dead: the rules
//! by which many nodes are one, without IO and without a clock.
//!
//! Nodes agree through one log: every write to it gets a number, the *revision*, and every node sees
//! all writes in that order, sooner or later. Three kinds of entries matter here.
//!
//! ```text
//!  lease   node → how often it has renewed it   written by the node itself, about once a second
//!  claim   environment → node, registration     written by the node that an executor came to
//!  (and registrations, of which only the revision counts)
//! ```
//!
//! - **Fresh view.** A node that sees its own lease come back in the log has seen everything that was
//!   written before it sent that. It takes nobody in unless it sent such a lease within
//!   [`Timing::own`]. One that was paused or cut off therefore catches up before it acts.
//! - **Newest claim wins.** The revision of a claim is its epoch. Whoever sees a newer claim than its
//!   own gives the executor's socket up. A claim for an older registration is never written over
//!   one for a newer.
//! - **Silence is death**, but only to who listens: a node is believed dead when its lease has not
//!   moved for [`Timing::others`], by the clock of a node whose own view was fresh all the while.
//!
//! Clocks are only ever compared with themselves, so it does not matter what they show. It matters
//! a little how fast they go: `others` is longer than `own` by more than they could drift apart.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// How long things count.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Between two renewals of the own lease.
    pub renew: Duration,
    /// How old the own view may be.
    pub own: Duration,
    /// How long others may be silent.
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

/// Who stands for an environment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// The node with the executor's socket.
    pub node: Arc<str>,
    /// The executor's registration.
    pub registration: Arc<str>,
    /// The revision of that registration.
    pub registered: u64,
}

impl Claim {
    /// Whether this claim may be written over `current`.
    pub fn may_follow(&self, current: Option<&Self>) -> bool {
        current.is_none_or(|current| current.registered <= self.registered)
    }
}

/// Where an environment is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Route {
    /// The own view is too old to say.
    Unknown,
    /// Its executor is here.
    Here {
        /// Of the claim.
        epoch: u64,
    },
    /// Its executor is at another node.
    There {
        /// Which claim, and so which node.
        claim: Claim,
        /// Of the claim.
        epoch: u64,
    },
    /// Nobody has it; since when, if that is known.
    Nowhere {
        /// When it was seen to go.
        since: Option<Instant>,
    },
}

/// What a new entry of the log means to this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing.
    Same,
    /// Our claim is not the newest any more: our executor's socket must go.
    Fenced,
    /// The environment is somewhere else than before: what led to the old place must go.
    Moved,
}

#[derive(Debug)]
struct Member {
    revision: u64,
    /// When its lease was last seen to move.
    seen: Instant,
    /// It was silent for too long.
    dead: bool,
}

#[derive(Debug)]
struct Known {
    revision: u64,
    claim: Option<Claim>,
    /// The node where it was last.
    last: Option<Arc<str>>,
    /// When we saw that.
    since: Instant,
}

/// A claim of ours.
#[derive(Debug, Clone, Copy)]
struct Own {
    /// Names the socket.
    socket: u64,
    revision: u64,
}

/// What one node knows of all, and what follows from it.
#[derive(Debug)]
pub struct Rules {
    node: Arc<str>,
    timing: Timing,
    /// Renewals that were sent and not seen yet: which, and when.
    sent: Vec<(u64, Instant)>,
    /// When the newest renewal was sent that was seen.
    fresh: Option<Instant>,
    members: HashMap<Arc<str>, Member>,
    claims: HashMap<Arc<str>, Known>,
    own: HashMap<Arc<str>, Own>,
}

impl Rules {
    /// A node that knows nothing.
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

    /// What this node is called.
    pub fn node(&self) -> &Arc<str> {
        &self.node
    }

    /// A renewal of our lease is about to be sent.
    pub fn renewing(&mut self, beat: u64, now: Instant) {
        /// More are not waited for: the oldest would not make the view fresh.
        const OUTSTANDING: usize = 64;
        if self.sent.len() >= OUTSTANDING {
            self.sent.remove(0);
        }
        self.sent.push((beat, now));
    }

    /// Our own lease was seen in the log, and with it all that came before it.
    pub fn renewed(&mut self, beat: u64, now: Instant) {
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
            // We have not listened for a while: nobody's silence counts yet.
            for member in self.members.values_mut() {
                member.seen = now;
            }
        }
        self.fresh = Some(self.fresh.map_or(at, |fresh| fresh.max(at)));
    }

    /// Whether the own view is new enough to act on.
    pub fn is_fresh(&self, now: Instant) -> bool {
        self.fresh
            .is_some_and(|at| now.saturating_duration_since(at) < self.timing.own)
    }

    /// Another node's lease has moved, or was removed.
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

    /// Whether a node is not believed dead.
    pub fn is_alive(&self, node: &str) -> bool {
        *node == *self.node || self.members.get(node).is_some_and(|member| !member.dead)
    }

    /// The other nodes that are alive.
    pub fn others(&self) -> Vec<Arc<str>> {
        let alive = self.members.iter().filter(|(_, member)| !member.dead);
        alive.map(|(node, _)| Arc::clone(node)).collect()
    }

    /// The nodes that are believed dead from now on.
    pub fn lapse(&mut self, now: Instant) -> Vec<Arc<str>> {
        if !self.is_fresh(now) {
            return Vec::new();
        }
        let mut lapsed = Vec::new();
        for (node, member) in &mut self.members {
            let silent = now.saturating_duration_since(member.seen) >= self.timing.others;
            if silent && !member.dead {
                member.dead = true;
                lapsed.push(Arc::clone(node));
            }
        }
        lapsed
    }

    /// Forgets a node that has been dead for so long that its lease can be removed: its revision.
    pub fn buried(&mut self, now: Instant, after: Duration) -> Vec<(Arc<str>, u64)> {
        let old =
            |member: &Member| member.dead && now.saturating_duration_since(member.seen) >= after;
        let buried: Vec<_> = self
            .members
            .iter()
            .filter(|(_, member)| old(member))
            .map(|(node, member)| (Arc::clone(node), member.revision))
            .collect();
        for (node, _) in &buried {
            self.members.remove(node);
        }
        buried
    }

    /// A claim was seen in the log, or its removal.
    pub fn claim(
        &mut self,
        environment: &Arc<str>,
        revision: u64,
        claim: Option<Claim>,
        now: Instant,
    ) -> Verdict {
        let before = self.claims.get(environment);
        if before.is_some_and(|before| before.revision >= revision) {
            return Verdict::Same;
        }
        // One that is gone may come back to the same place, where its streams are waited for.
        let last = before.and_then(|before| before.last.clone());
        let place = claim.as_ref().map(|claim| Arc::clone(&claim.node));
        let moved = place.is_some() && last.is_some() && last != place;
        let known = Known {
            revision,
            claim,
            last: place.or(last),
            since: now,
        };
        let ours = known.claim.as_ref().is_some_and(|it| it.node == self.node);
        self.claims.insert(Arc::clone(environment), known);
        if ours {
            // We have just written it, and are about to be told so.
            return Verdict::Same;
        }
        match self.own.get(environment) {
            Some(own) if own.revision < revision => {
                self.own.remove(environment);
                Verdict::Fenced
            }
            _ if moved => Verdict::Moved,
            _ => Verdict::Same,
        }
    }

    /// Our claim was written. `false` if a newer one is known already, and ours is worth nothing.
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
        let known = Known {
            revision,
            last: Some(Arc::clone(&claim.node)),
            claim: Some(claim),
            since: now,
        };
        self.claims.insert(Arc::clone(environment), known);
        let own = Own { socket, revision };
        self.own.insert(Arc::clone(environment), own);
        true
    }

    /// The executor's socket is gone: the revision of the claim to be removed, if it is still ours.
    pub fn release(&mut self, environment: &str, socket: u64) -> Option<u64> {
        let own = self.own.get(environment).copied()?;
        if own.socket != socket {
            return None;
        }
        self.own.remove(environment);
        Some(own.revision)
    }

    /// Whether a stream may be opened here that was meant for this epoch.
    pub fn holds(&self, environment: &str, epoch: u64, now: Instant) -> bool {
        self.is_fresh(now)
            && self
                .own
                .get(environment)
                .is_some_and(|own| own.revision == epoch)
    }

    /// The socket of our claim on an environment.
    pub fn own_socket(&self, environment: &str) -> Option<u64> {
        self.own.get(environment).map(|own| own.socket)
    }

    /// Where streams to an environment go.
    pub fn route(&self, environment: &str, now: Instant) -> Route {
        if !self.is_fresh(now) {
            return Route::Unknown;
        }
        if let Some(own) = self.own.get(environment) {
            let epoch = own.revision;
            return Route::Here { epoch };
        }
        let Some(known) = self.claims.get(environment) else {
            return Route::Nowhere { since: None };
        };
        match &known.claim {
            Some(claim) if claim.node != self.node && self.is_alive(&claim.node) => Route::There {
                claim: claim.clone(),
                epoch: known.revision,
            },
            _ => Route::Nowhere {
                since: Some(known.since),
            },
        }
    }

    /// The claims of all, wherever they are.
    pub fn claims(&self) -> impl Iterator<Item = (&Arc<str>, &Claim)> {
        let claims = self.claims.iter();
        claims.filter_map(|(environment, known)| Some((environment, known.claim.as_ref()?)))
    }

    /// The log has begun anew, with small numbers: what the old ones said is void, but who is here
    /// stays here. The claims to be written again are given, and count again once they are.
    pub fn begin_anew(&mut self) -> Vec<(Arc<str>, u64)> {
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
    fn nobody_acts_on_an_old_view() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut rules = Rules::new("a".into(), Timing::default());
        let environment: Arc<str> = "e".into();
        assert!(rules.claimed(&environment, 1, 5, claim("a", 1), at(0)));
        assert_eq!(rules.route("e", at(0)), Route::Unknown);
        rules.renewing(1, at(0));
        assert!(!rules.holds("e", 5, at(0)), "sent is not seen");
        rules.renewed(1, at(10));
        assert!(rules.holds("e", 5, at(2999)) && !rules.holds("e", 4, at(2999)));
        // Counted from when it was sent, not from when it was seen.
        assert!(!rules.holds("e", 5, at(3000)));
        assert_eq!(rules.route("e", at(3000)), Route::Unknown);
        rules.renewing(2, at(20_000));
        rules.renewed(2, at(20_001));
        assert_eq!(rules.route("e", at(20_002)), Route::Here { epoch: 5 });
        assert_eq!(
            rules.claim(&environment, 9, Some(claim("b", 1)), at(20_003)),
            Verdict::Fenced
        );
        assert!(!rules.holds("e", 5, at(20_004)));
        assert_eq!(rules.release("e", 1), None, "it is not ours to remove");
    }

    #[test]
    fn silence_counts_only_while_one_listens() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut rules = Rules::new("a".into(), Timing::default());
        let (environment, other): (Arc<str>, Arc<str>) = ("e".into(), "b".into());
        rules.renewing(1, at(0));
        rules.renewed(1, at(0));
        rules.lease(&other, 3, false, at(0));
        rules.claim(&environment, 4, Some(claim("b", 1)), at(0));
        assert!(matches!(
            rules.route("e", at(1)),
            Route::There { epoch: 4, .. }
        ));
        // Cut off for a minute: it is we who were not there.
        assert_eq!(rules.lapse(at(60_000)), [] as [Arc<str>; 0]);
        rules.renewing(2, at(60_000));
        rules.renewed(2, at(60_001));
        assert_eq!(rules.lapse(at(60_002)), [] as [Arc<str>; 0]);
        for beat in 0..8 {
            let now = at(60_500 + beat * 600);
            rules.renewing(3 + beat, now);
            rules.renewed(3 + beat, now);
            assert!(rules.is_alive("b"));
        }
        assert_eq!(rules.lapse(at(65_100)), [Arc::clone(&other)]);
        assert_eq!(rules.lapse(at(65_101)), [] as [Arc<str>; 0], "told once");
        assert!(matches!(
            rules.route("e", at(65_102)),
            Route::Nowhere { since: Some(_) }
        ));
        // An old notice does not raise it; a new one does.
        rules.lease(&other, 3, false, at(65_200));
        assert!(!rules.is_alive("b"));
        rules.lease(&other, 10, false, at(65_200));
        assert!(rules.is_alive("b"));
    }

    #[test]
    fn one_that_went_and_came_elsewhere_has_moved() {
        let now = Instant::now();
        let mut rules = Rules::new("a".into(), Timing::default());
        let environment: Arc<str> = "e".into();
        let mut see = |revision, claim| rules.claim(&environment, revision, claim, now);
        assert_eq!(see(1, Some(claim("b", 1))), Verdict::Same);
        assert_eq!(see(2, None), Verdict::Same);
        assert_eq!(see(3, Some(claim("b", 1))), Verdict::Same, "it came back");
        assert_eq!(see(4, None), Verdict::Same);
        assert_eq!(see(5, Some(claim("c", 1))), Verdict::Moved);
        assert_eq!(see(4, Some(claim("b", 1))), Verdict::Same, "old news");
    }

    #[test]
    fn what_we_have_written_ourselves_is_no_news() {
        let now = Instant::now();
        let mut rules = Rules::new("a".into(), Timing::default());
        let environment: Arc<str> = "e".into();
        rules.claim(&environment, 1, Some(claim("b", 1)), now);
        // Seen before the bucket has said that it was written.
        let seen = rules.claim(&environment, 2, Some(claim("a", 1)), now);
        assert_eq!(seen, Verdict::Same);
        assert!(rules.claimed(&environment, 1, 2, claim("a", 1), now));
        let again = rules.claim(&environment, 3, Some(claim("a", 1)), now);
        assert_eq!((again, rules.own_socket("e")), (Verdict::Same, Some(1)));
        assert!(rules.claimed(&environment, 2, 3, claim("a", 1), now));
        assert_eq!(rules.own_socket("e"), Some(2));
        let removed = rules.claim(&environment, 4, None, now);
        assert_eq!(removed, Verdict::Fenced, "somebody took it from us");
    }

    #[test]
    fn an_older_registration_does_not_follow_a_newer() {
        assert!(claim("a", 5).may_follow(None));
        assert!(claim("a", 5).may_follow(Some(&claim("b", 5))));
        assert!(!claim("a", 4).may_follow(Some(&claim("b", 5))));
    }

    #[test]
    fn a_log_that_begins_anew_voids_what_the_old_one_said() {
        let now = Instant::now();
        let mut rules = Rules::new("a".into(), Timing::default());
        let environment: Arc<str> = "e".into();
        assert!(rules.claimed(&environment, 7, 900, claim("a", 1), now));
        assert_eq!(rules.begin_anew(), [(Arc::clone(&environment), 7)]);
        assert!(rules.claimed(&environment, 7, 2, claim("a", 1), now));
        assert_eq!(rules.release("e", 7), Some(2));
    }
}
