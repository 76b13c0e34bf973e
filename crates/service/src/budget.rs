//! Memory budget of the server, in bytes, that all connections share fairly.
//!
//! One budget bounds responses that wait for their peers; another one bounds incomplete messages.
//! The limits of a single connection are in `outbox` and `backlog`.
//!
//! ```text
//! 0 ──────────────────────── 1/2 ───────── 3/4 ───────── 1
//! │ any request              │ connections │ guaranteed  │
//! │                          │ that hold   │ bytes only  │
//! │                          │ little      │             │
//! ```
//!
//! Memory is granted first to the waiting request whose principal holds the least, then to the one
//! whose connection holds the least. If no memory becomes free because peers do not read their
//! responses, the server closes the connection that holds the most and makes no progress.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use exec_server_sync::{Mutex, MutexGuard};
use exec_server_transport::IncomingLimiter;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Bytes that each connection may hold as long as the budget has any left: one block of a file as
/// text, or two pieces of a file that is sent in pieces.
pub(crate) const GUARANTEED_BYTES: usize = 3 << 19;

/// How long a peer that holds memory may make no progress while other connections wait for memory.
const STALLED: Duration = Duration::from_secs(5);

/// Fewer bytes than this in [`STALLED`] count as no progress.
const PROGRESS_BYTES: usize = 64 * 1024;

/// Interval at which a waiting request checks for peers without progress.
const TICK: Duration = Duration::from_millis(500);

/// Whether one connection may go beyond the budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Overdraft {
    /// No connection may exceed it.
    Refused,
    /// The connection that holds the most may exceed it. Messages free their memory only when they
    /// are complete, so without this rule all connections could wait for each other.
    ForLargest,
}

/// A budget of bytes.
#[derive(Debug)]
pub(crate) struct MemoryBudget {
    total: AtomicUsize,
    /// Bytes of caches that count against the budget, up to a quarter of it.
    caches: fn() -> usize,
    excess: Overdraft,
    state: Mutex<BudgetState>,
}

#[derive(Debug, Default)]
struct BudgetState {
    used: usize,
    /// Accounts that hold memory, by their number.
    holders: HashMap<u64, BudgetHolder>,
    /// Bytes that the accounts of each principal hold.
    principals: HashMap<Arc<str>, usize>,
    /// Waiting requests, in order of arrival.
    waiting: Vec<MemoryRequest>,
    next_account: u64,
    /// When a connection was last closed for making no progress.
    ended: Option<Instant>,
}

#[derive(Debug)]
struct BudgetHolder {
    account: Arc<AccountShared>,
    bytes: usize,
}

/// A request that waits for memory.
#[derive(Debug)]
struct MemoryRequest {
    account: BudgetAccount,
    bytes: usize,
    granted: oneshot::Sender<BudgetShare>,
}

/// The account of one connection in a budget; cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct BudgetAccount {
    budget: Arc<MemoryBudget>,
    shared: Arc<AccountShared>,
}

#[derive(Debug)]
struct AccountShared {
    number: u64,
    principal: Arc<str>,
    /// Cancelled to end the connection.
    end: CancellationToken,
    /// The connection waits for its peer, which must read a response or send more data.
    depends_on_peer: AtomicBool,
    /// When the peer last made progress, in milliseconds of [`now`].
    progress: AtomicU64,
    /// Bytes moved since the last progress.
    progressed: AtomicUsize,
}

/// Bytes taken from a budget; returned to it on drop.
#[derive(Debug)]
pub(crate) struct BudgetShare {
    account: BudgetAccount,
    bytes: usize,
}

/// Milliseconds since the first call.
fn now() -> u64 {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    let elapsed = Instant::now().saturating_duration_since(*START);
    elapsed.as_millis() as u64
}

impl MemoryBudget {
    pub(crate) fn new(total: usize, excess: Overdraft) -> Arc<Self> {
        Self::with_caches(total, excess, || 0)
    }

    /// A budget against which the bytes of caches count, too.
    pub(crate) fn with_caches(total: usize, excess: Overdraft, caches: fn() -> usize) -> Arc<Self> {
        Arc::new(Self {
            total: AtomicUsize::new(total),
            caches,
            excess,
            state: Mutex::default(),
        })
    }

    /// Changes the size of the budget; bytes already taken are kept.
    pub(crate) fn set_total(self: &Arc<Self>, total: usize) {
        self.total.store(total, Ordering::Relaxed);
        self.grant(self.state());
    }

    /// Bytes in use.
    pub(crate) fn used(&self) -> usize {
        self.state().used
    }

    /// Creates the account of a connection of this principal; `end` ends the connection.
    pub(crate) fn account(
        self: &Arc<Self>,
        principal: &Arc<str>,
        end: CancellationToken,
    ) -> BudgetAccount {
        let number = {
            let mut state = self.state();
            state.next_account += 1;
            state.next_account
        };
        BudgetAccount {
            budget: Arc::clone(self),
            shared: Arc::new(AccountShared {
                number,
                principal: Arc::clone(principal),
                end,
                depends_on_peer: AtomicBool::new(false),
                progress: AtomicU64::new(0),
                progressed: AtomicUsize::new(0),
            }),
        }
    }

    fn state(&self) -> MutexGuard<'_, BudgetState> {
        self.state.lock()
    }

    fn total(&self) -> usize {
        let total = self.total.load(Ordering::Relaxed);
        total - (self.caches)().min(total / 4)
    }

    /// Whether this account may take `bytes` more.
    fn fits(&self, state: &BudgetState, account: &AccountShared, bytes: usize) -> bool {
        let total = self.total();
        let held = state.held(account);
        let beyond = match self.excess {
            Overdraft::Refused => 0,
            Overdraft::ForLargest => state.largest().map_or(0, |(bytes, _)| bytes),
        };
        let used = (state.used - beyond).saturating_add(bytes);
        if held + bytes <= GUARANTEED_BYTES && used <= total {
            return true;
        }
        let limit = match held < GUARANTEED_BYTES {
            true => total / 4 * 3,
            false => total / 2,
        };
        used <= limit || state.used == 0 || self.is_excess(state, account)
    }

    /// Whether this account may exceed the budget.
    fn is_excess(&self, state: &BudgetState, account: &AccountShared) -> bool {
        let largest = || {
            state
                .largest()
                .is_none_or(|(_, number)| number == account.number)
        };
        self.excess == Overdraft::ForLargest && largest()
    }

    /// Grants the waiting requests that fit. Releases the lock before it wakes them.
    fn grant(self: &Arc<Self>, mut state: MutexGuard<'_, BudgetState>) {
        let mut granted = Vec::new();
        while let Some(at) = self.next(&state) {
            let MemoryRequest {
                account,
                bytes,
                granted: sender,
            } = state.waiting.remove(at);
            granted.push((sender, account.hold(&mut state, bytes)));
        }
        drop(state);
        for (sender, share) in granted {
            // If the request was cancelled, this returns the share to the budget.
            drop(sender.send(share));
        }
    }

    /// Selects the waiting request that is granted next.
    fn next(&self, state: &BudgetState) -> Option<usize> {
        let rank = |waiting: &MemoryRequest| {
            let account = &waiting.account.shared;
            let principal = state.principals.get(&account.principal);
            (principal.copied().unwrap_or(0), state.held(account))
        };
        let fits =
            |waiting: &MemoryRequest| self.fits(state, &waiting.account.shared, waiting.bytes);
        let waiting = state.waiting.iter().enumerate();
        // An account that holds little is served before a larger request that does not fit. Larger
        // requests do not overtake each other, so that each is served eventually.
        let first = waiting.clone().min_by_key(|(_, waiting)| rank(waiting))?;
        if fits(first.1) {
            return Some(first.0);
        }
        let exempt = |waiting: &MemoryRequest| {
            let account = &waiting.account.shared;
            state.held(account) + waiting.bytes <= GUARANTEED_BYTES
                || self.is_excess(state, account)
        };
        waiting
            .filter(|(_, waiting)| exempt(waiting) && fits(waiting))
            .map(|(at, _)| at)
            .next()
    }

    /// Closes the connection that holds the most if its peer makes no progress.
    fn end_stalled(&self) {
        /// Time for a closed connection to return its memory before another one is closed.
        const PAUSE: Duration = Duration::from_millis(100);
        let mut state = self.state();
        if state.waiting.is_empty() || state.ended.is_some_and(|last| last.elapsed() < PAUSE) {
            return;
        }
        let stalled = |holder: &&BudgetHolder| {
            let account = &holder.account;
            let since = now().saturating_sub(account.progress.load(Ordering::Relaxed));
            account.depends_on_peer.load(Ordering::Relaxed)
                && since >= STALLED.as_millis() as u64
                && !account.end.is_cancelled()
        };
        let worst = state
            .holders
            .values()
            .filter(stalled)
            .max_by_key(|holder| holder.bytes);
        if let Some(BudgetHolder { account, bytes }) = worst {
            tracing::warn!(
                principal = &*account.principal,
                bytes,
                "connection without progress ends: others wait for the memory that it holds"
            );
            account.end.cancel();
            state.ended = Some(Instant::now());
        }
    }
}

impl BudgetState {
    /// The bytes held by the largest account and its number; of two equal accounts, the older one.
    fn largest(&self) -> Option<(usize, u64)> {
        let holders = self.holders.iter();
        holders
            .map(|(&number, holder)| (holder.bytes, number))
            .max_by_key(|&(bytes, number)| (bytes, u64::MAX - number))
    }

    fn held(&self, account: &AccountShared) -> usize {
        self.holders
            .get(&account.number)
            .map_or(0, |holder| holder.bytes)
    }
}

impl BudgetAccount {
    /// Adds `bytes` to the account.
    fn hold(&self, state: &mut BudgetState, bytes: usize) -> BudgetShare {
        state.used += bytes;
        let holder = state
            .holders
            .entry(self.shared.number)
            .or_insert_with(|| BudgetHolder {
                account: Arc::clone(&self.shared),
                bytes: 0,
            });
        holder.bytes += bytes;
        let principal = Arc::clone(&self.shared.principal);
        *state.principals.entry(principal).or_default() += bytes;
        BudgetShare {
            account: self.clone(),
            bytes,
        }
    }

    /// The bytes that a request counts: where the budget must not be exceeded, at most half of it,
    /// so that the request can be granted while other connections hold little.
    fn counted(&self, bytes: usize) -> usize {
        match self.budget.excess {
            Overdraft::Refused => bytes.min(self.budget.total() / 2),
            Overdraft::ForLargest => bytes,
        }
    }

    /// Takes `bytes` if they are free and no other request waits for them.
    pub(crate) fn try_take(&self, bytes: usize) -> Option<BudgetShare> {
        let bytes = self.counted(bytes);
        let mut state = self.budget.state();
        let guaranteed = state.held(&self.shared) + bytes <= GUARANTEED_BYTES;
        let waits = !state.waiting.is_empty()
            && !guaranteed
            && !self.budget.is_excess(&state, &self.shared);
        (!waits && self.budget.fits(&state, &self.shared, bytes))
            .then(|| self.hold(&mut state, bytes))
    }

    /// Waits until `bytes` are granted.
    ///
    /// Cancel safe: a granted share is returned if the future is dropped.
    pub(crate) async fn take(&self, bytes: usize) -> BudgetShare {
        if let Some(share) = self.try_take(bytes) {
            return share;
        }
        let bytes = self.counted(bytes);
        let (granted, mut share) = oneshot::channel();
        {
            let mut state = self.budget.state();
            // Removes requests whose connection has ended in the meantime.
            state.waiting.retain(|waiting| !waiting.granted.is_closed());
            state.waiting.push(MemoryRequest {
                account: self.clone(),
                bytes,
                granted,
            });
            // A share may have been returned before this request was added to the queue.
            self.budget.grant(state);
        }
        loop {
            match tokio::time::timeout(TICK, &mut share).await {
                Ok(Ok(share)) => return share,
                // The sender is dropped only after it was used.
                Ok(Err(_)) => return self.hold(&mut self.budget.state(), bytes),
                Err(_) => {
                    // Caches may have become smaller.
                    self.budget.grant(self.budget.state());
                    self.budget.end_stalled();
                }
            }
        }
    }

    /// Sets whether the connection waits for its peer to read a response or to send more data.
    pub(crate) fn depends_on_peer(&self, depends: bool) {
        let shared = &self.shared;
        if depends {
            shared.progress.store(now(), Ordering::Relaxed);
        }
        shared.depends_on_peer.store(depends, Ordering::Relaxed);
    }

    /// Records that the peer has moved `bytes`.
    pub(crate) fn progressed(&self, bytes: usize) {
        let shared = &self.shared;
        if shared.progressed.fetch_add(bytes, Ordering::Relaxed) + bytes >= PROGRESS_BYTES {
            shared.progressed.store(0, Ordering::Relaxed);
            shared.progress.store(now(), Ordering::Relaxed);
        }
    }
}

impl BudgetShare {
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns all but `bytes` to the budget.
    pub(crate) fn shrink(&mut self, bytes: usize) {
        let spare = self.bytes.saturating_sub(bytes);
        self.bytes -= spare;
        self.account.give_back(spare);
    }

    /// Merges two shares of the same account.
    pub(crate) fn merge(&mut self, mut other: Self) {
        self.bytes += std::mem::take(&mut other.bytes);
    }
}

impl Drop for BudgetShare {
    fn drop(&mut self) {
        self.account.give_back(self.bytes);
    }
}

impl BudgetAccount {
    fn give_back(&self, bytes: usize) {
        if bytes == 0 {
            return;
        }
        let mut state = self.budget.state();
        state.used -= bytes;
        if let Some(holder) = state.holders.get_mut(&self.shared.number) {
            holder.bytes -= bytes;
            if holder.bytes == 0 {
                state.holders.remove(&self.shared.number);
            }
        }
        if let Some(held) = state.principals.get_mut(&self.shared.principal) {
            *held -= bytes;
            if *held == 0 {
                state.principals.remove(&self.shared.principal);
            }
        }
        if !state.waiting.is_empty() {
            self.budget.grant(state);
        }
    }
}

/// Memory of the incomplete message of one connection, from the budget of all such messages.
pub(crate) struct IncompleteMessageBudget {
    account: BudgetAccount,
    share: Option<BudgetShare>,
    asking: Option<Pin<Box<dyn Future<Output = BudgetShare> + Send>>>,
}

impl IncompleteMessageBudget {
    /// Bytes requested in one step, large enough that steps are rare.
    const STEP_BYTES: usize = 1 << 20;

    pub(crate) fn new(account: BudgetAccount) -> Self {
        Self {
            account,
            share: None,
            asking: None,
        }
    }
}

impl IncomingLimiter for IncompleteMessageBudget {
    fn poll_hold(&mut self, cx: &mut Context<'_>, bytes: usize) -> Poll<()> {
        loop {
            let held = self.share.as_ref().map_or(0, BudgetShare::bytes);
            if held >= bytes {
                return Poll::Ready(());
            }
            let asking = match &mut self.asking {
                Some(asking) => asking,
                None => {
                    let more = (bytes - held).next_multiple_of(Self::STEP_BYTES);
                    if let Some(share) = self.account.try_take(more) {
                        self.add(share);
                        continue;
                    }
                    self.account.depends_on_peer(false);
                    let account = self.account.clone();
                    self.asking
                        .insert(Box::pin(async move { account.take(more).await }))
                }
            };
            let share = ready!(asking.as_mut().poll(cx));
            self.asking = None;
            self.add(share);
        }
    }

    fn arrived(&mut self, bytes: usize) {
        self.account.progressed(bytes);
    }

    fn release(&mut self) {
        self.account.depends_on_peer(false);
        self.share = None;
    }
}

impl IncompleteMessageBudget {
    fn add(&mut self, share: BudgetShare) {
        match &mut self.share {
            Some(held) => held.merge(share),
            None => self.share = Some(share),
        }
        self.account.depends_on_peer(true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn account(budget: &Arc<MemoryBudget>, principal: &str) -> (BudgetAccount, CancellationToken) {
        let end = CancellationToken::new();
        (budget.account(&principal.into(), end.clone()), end)
    }

    /// Returns the output of a future if it is ready once all other tasks have run.
    async fn is_ready<T>(future: &mut Pin<Box<dyn Future<Output = T> + '_>>) -> Option<T> {
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        std::future::poll_fn(|cx| match future.as_mut().poll(cx) {
            Poll::Ready(done) => Poll::Ready(Some(done)),
            Poll::Pending => Poll::Ready(None),
        })
        .await
    }

    #[test]
    fn connection_that_holds_nothing_gets_guaranteed_bytes_while_another_holds_much() {
        let budget = MemoryBudget::new(16 * MIB, Overdraft::Refused);
        let (greedy, _) = account(&budget, "a");
        let mut held = Vec::new();
        while let Some(share) = greedy.try_take(MIB) {
            held.push(share);
        }
        assert_eq!(budget.used(), 8 * MIB);
        let (modest, _) = account(&budget, "a");
        let large = modest.try_take(4 * MIB).expect("three quarters");
        assert!(modest.try_take(MIB).is_none());
        drop(large);
        let (other, _) = account(&budget, "b");
        assert!(other.try_take(5 * MIB).is_none());
        let small: Vec<_> = (0..5)
            .map(|_| account(&budget, "b").0.try_take(GUARANTEED_BYTES))
            .collect();
        assert!(small.iter().all(Option::is_some));
        let last = account(&budget, "b").0.try_take(GUARANTEED_BYTES);
        assert!(last.is_none(), "the budget is the bound of all");
        drop((held, small));
        assert_eq!(budget.used(), 0);
        assert!(budget.state().holders.is_empty() && budget.state().principals.is_empty());
    }

    #[tokio::test]
    async fn waiting_request_of_principal_that_holds_least_is_granted_first() {
        let budget = MemoryBudget::new(16 * MIB, Overdraft::Refused);
        let (one, _) = account(&budget, "a");
        let (second, _) = account(&budget, "a");
        let (other, _) = account(&budget, "b");
        let held = one.try_take(8 * MIB).unwrap();
        let more = second.try_take(4 * MIB).unwrap();
        let mut first: Pin<Box<dyn Future<Output = BudgetShare>>> = Box::pin(second.take(4 * MIB));
        let mut late: Pin<Box<dyn Future<Output = BudgetShare>>> = Box::pin(other.take(4 * MIB));
        assert!(is_ready(&mut first).await.is_none());
        assert!(is_ready(&mut late).await.is_none());
        drop(more);
        let granted = is_ready(&mut late).await.expect("the other principal");
        assert!(is_ready(&mut first).await.is_none());
        drop((granted, held));
        assert!(is_ready(&mut first).await.is_some());
    }

    #[test]
    fn caches_count_up_to_a_quarter_of_the_budget() {
        let taken = |caches| {
            let budget = MemoryBudget::with_caches(16 * MIB, Overdraft::Refused, caches);
            let (one, _) = account(&budget, "a");
            std::iter::from_fn(|| one.try_take(MIB))
                .take(100)
                .collect::<Vec<_>>()
                .len()
        };
        assert_eq!(
            [taken(|| 0), taken(|| 2 * MIB), taken(|| 100 * MIB)],
            [8, 7, 6]
        );
    }

    #[tokio::test]
    async fn dropped_request_does_not_block_others() {
        let budget = MemoryBudget::new(16 * MIB, Overdraft::Refused);
        let (one, _) = account(&budget, "a");
        let held = one.try_take(8 * MIB).unwrap();
        let mut given_up: Pin<Box<dyn Future<Output = BudgetShare>>> = Box::pin(one.take(8 * MIB));
        assert!(is_ready(&mut given_up).await.is_none());
        drop(given_up);
        drop(held);
        assert_eq!(budget.used(), 0);
        assert!(one.try_take(8 * MIB).is_some());
    }

    #[tokio::test]
    async fn largest_unfinished_message_may_exceed_the_budget() {
        let budget = MemoryBudget::new(4 * MIB, Overdraft::ForLargest);
        let (one, _) = account(&budget, "a");
        let (other, _) = account(&budget, "b");
        let mut cx = Context::from_waker(std::task::Waker::noop());
        let (mut first, mut second) = (
            IncompleteMessageBudget::new(one),
            IncompleteMessageBudget::new(other),
        );
        assert!(first.poll_hold(&mut cx, 2 * MIB).is_ready());
        assert!(second.poll_hold(&mut cx, MIB).is_ready());
        assert!(second.poll_hold(&mut cx, 4 * MIB).is_pending());
        assert!(first.poll_hold(&mut cx, 60 * MIB).is_ready());
        assert!(second.poll_hold(&mut cx, 4 * MIB).is_pending());
        first.release();
        assert!(second.poll_hold(&mut cx, 60 * MIB).is_ready());
        drop(second);
        assert_eq!(budget.used(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn connection_without_progress_is_closed_while_others_wait() {
        let budget = MemoryBudget::new(16 * MIB, Overdraft::Refused);
        let (stuck, ended) = account(&budget, "a");
        let (busy, busy_ended) = account(&budget, "a");
        let held = stuck.try_take(6 * MIB).unwrap();
        let also = busy.try_take(6 * MIB).unwrap();
        stuck.depends_on_peer(true);
        busy.depends_on_peer(false);
        let waits = async {
            let (newcomer, _) = account(&budget, "b");
            newcomer.take(4 * MIB).await
        };
        let gives_back = async {
            ended.cancelled().await;
            drop(held);
        };
        let (share, ()) = tokio::join!(waits, gives_back);
        assert_eq!(share.bytes(), 4 * MIB);
        assert!(!busy_ended.is_cancelled());
        drop(also);
    }
}
