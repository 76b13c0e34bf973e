//! Tenants and their quotas.
//!
//! Tenants share a rendezvous server and cannot see each other. This module owns their names, their
//! quotas and the measurement of their usage. An environment belongs to one tenant: stores and
//! routers identify it as `TENANT/ID`, or by its id alone for the tenant `default`. Two tenants can
//! therefore use the same environment id, and for a client an environment of another tenant does
//! not exist.
//!
//! ```text
//! # tenant  quotas
//! acme      environments=200 streams=500 bandwidth=50M handshakes=20
//! *         environments=10 streams=20
//! ```

pub mod share;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use exec_server_sync::{Mutex, MutexGuard};
use exec_server_transport::metrics::Counter;

use crate::router::FrameKind;
use crate::tokens::is_name;
use share::{RateMeter, Rates, share};

/// Tenant of tokens and environments that name no tenant.
pub const DEFAULT: &str = "default";

/// Stands for all tenants: in tokens of operators, and in quotas for all tenants without a line of
/// their own.
pub const ALL: &str = "*";

/// Label of all tenants that are not counted separately; no tenant can have this name.
const OTHER: &str = "other";

/// Whether a tenant may have this name.
pub fn is_tenant(name: &str) -> bool {
    is_name(name) && name != OTHER
}

/// Name of a tenant's environment or harness, unique among all tenants.
pub fn scoped(tenant: &str, id: &str) -> String {
    if tenant == DEFAULT {
        return id.to_owned();
    }
    format!("{tenant}/{id}")
}

/// Splits a name made by [`scoped`] into the tenant and the tenant's own name.
pub fn split(scoped: &str) -> (&str, &str) {
    scoped.split_once('/').unwrap_or((DEFAULT, scoped))
}

/// Quota of one tenant; `None` means unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Quota {
    /// Registered environments.
    pub environments: Option<u64>,
    /// Simultaneous streams.
    pub streams: Option<u64>,
    /// Bytes of relay frames per second, both directions together.
    pub bandwidth: Option<u64>,
    /// Handshakes per second.
    pub handshakes: Option<u64>,
}

/// Smallest bandwidth quota: the largest frame then waits four seconds, which no peer treats as a
/// failure.
pub const MIN_BANDWIDTH: u64 = 64 << 10;

/// Quotas of all tenants.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Quotas {
    named: BTreeMap<String, Quota>,
    /// Quota of tenants without a separate line.
    others: Quota,
}

/// Error in a line of quotas.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}")]
pub struct QuotasParseError {
    /// Line number, counted from 1.
    pub line: usize,
    /// Description of the error.
    pub problem: String,
}

impl FromStr for Quotas {
    type Err = QuotasParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut quotas = Self::default();
        let mut seen = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let problem = |problem| QuotasParseError {
                line: index + 1,
                problem,
            };
            let (tenant, quota) = parse_quota(line).map_err(problem)?;
            if seen.contains(&tenant) {
                return Err(problem(format!(
                    "there is more than one line for `{tenant}`"
                )));
            }
            seen.push(tenant.clone());
            quotas.set(tenant, quota);
        }
        Ok(quotas)
    }
}

/// Parses one line of quotas: `TENANT NAME=NUMBER…`.
///
/// # Errors
///
/// If the line is invalid, with a description.
pub fn parse_quota(line: &str) -> Result<(String, Quota), String> {
    let mut words = line.split_ascii_whitespace();
    let tenant = words.next().unwrap_or_default();
    if tenant != ALL && !is_tenant(tenant) {
        return Err(format!(
            "`{tenant}` is neither a valid tenant name nor `{ALL}`"
        ));
    }
    let mut quota = Quota::default();
    for word in words {
        let (name, number) = word
            .split_once('=')
            .ok_or_else(|| format!("`{word}`: expected NAME=NUMBER"))?;
        let slot = match name {
            "environments" => &mut quota.environments,
            "streams" => &mut quota.streams,
            "bandwidth" => &mut quota.bandwidth,
            "handshakes" => &mut quota.handshakes,
            _ => {
                return Err(format!(
                    "unknown quota `{name}`; there are environments, streams, bandwidth and \
                     handshakes"
                ));
            }
        };
        let number = parse_number(number)
            .ok_or_else(|| format!("`{word}`: expected a number, as in 500, 64K, 50M or 1G"))?;
        if slot.replace(number).is_some() {
            return Err(format!("`{name}` is given twice"));
        }
    }
    if let Some(bandwidth) = quota.bandwidth
        && bandwidth < MIN_BANDWIDTH
    {
        return Err(format!(
            "a bandwidth of {bandwidth} bytes a second is too little for one frame; {MIN_BANDWIDTH} \
             is the least"
        ));
    }
    if quota.handshakes == Some(0) {
        return Err("a quota of no handshakes refuses all harnesses; remove the tokens of the tenant instead".to_owned());
    }
    Ok((tenant.to_owned(), quota))
}

fn parse_number(text: &str) -> Option<u64> {
    let (digits, shift) = match text.as_bytes().last()? {
        b'K' => (&text[..text.len() - 1], 10),
        b'M' => (&text[..text.len() - 1], 20),
        b'G' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

impl Quotas {
    /// Sets the quota of a tenant, or with [`ALL`] the quota of tenants without a separate line.
    pub fn set(&mut self, tenant: String, quota: Quota) {
        if tenant == ALL {
            self.others = quota;
        } else {
            self.named.insert(tenant, quota);
        }
    }

    /// Quota of a tenant.
    pub fn of(&self, tenant: &str) -> Quota {
        self.named.get(tenant).copied().unwrap_or(self.others)
    }
}

/// A tenant has reached its quota.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("tenant `{tenant}` has reached its quota of {limit} {what}")]
pub(crate) struct QuotaError {
    tenant: Arc<str>,
    what: &'static str,
    limit: u64,
    /// How long to wait before another try, if waiting helps.
    pub(crate) retry: Option<Duration>,
}

/// Token bucket that fills at a constant rate.
///
/// Any amount can be taken while the bucket is not empty, even more than it holds; the next request
/// waits until the debt is paid.
#[derive(Debug, Default)]
struct TokenBucket {
    level: f64,
    /// Time of the last request; before it the bucket was full.
    at: Option<Instant>,
}

impl TokenBucket {
    /// Takes `amount`, or returns how long to wait before another try. The capacity is one second
    /// of the rate.
    fn take(&mut self, amount: u64, rate: f64, now: Instant) -> Result<(), Duration> {
        self.fill(rate, now);
        if self.level <= 0.0 {
            let seconds = (1.0 - self.level) / rate;
            return Err(Duration::from_secs_f64(seconds.clamp(0.001, 3600.0)));
        }
        self.level -= amount as f64;
        Ok(())
    }

    fn fill(&mut self, rate: f64, now: Instant) {
        let full = rate.max(1.0);
        self.level = match self.at {
            Some(at) => full.min(self.level + now.duration_since(at).as_secs_f64() * rate),
            None => full,
        };
        self.at = Some(now);
    }
}

/// Usage counters of one tenant, or of all tenants that are not counted separately.
#[derive(Debug, Default)]
pub(crate) struct UsageCounters {
    pub(crate) executors: Counter,
    pub(crate) streams: Counter,
    pub(crate) received_bytes: Counter,
    pub(crate) handshakes: Counter,
    /// Frames that waited for bandwidth or handshakes.
    pub(crate) waits: Counter,
    /// Requests and sockets refused because a quota was reached.
    pub(crate) refused: Counter,
}

/// Usage of one tenant.
#[derive(Debug)]
pub(crate) struct TenantUsage {
    pub(crate) tenant: Arc<str>,
    limits: Mutex<NodeQuota>,
    /// This node's share of the bandwidth quota in bytes per second, as an atomic for fast reads; 0
    /// if unlimited.
    bandwidth: AtomicU64,
    streams: AtomicU64,
    bytes: Mutex<TokenBucket>,
    /// Order of the waiting sockets while the bandwidth quota is exhausted: first come, first
    /// served.
    wait_order: tokio::sync::Mutex<()>,
    handshakes: Mutex<TokenBucket>,
    /// Amounts used on this node that are limited per second.
    used_bytes: AtomicU64,
    used_handshakes: AtomicU64,
    rate_meters: Mutex<RateMeters>,
    pub(crate) counters: Arc<UsageCounters>,
}

/// Limits of a tenant on this node.
#[derive(Debug, Clone, Copy, Default)]
struct NodeQuota {
    quota: Quota,
    /// This node's share of the handshakes per second.
    handshakes: Option<f64>,
}

/// Measured rates of a tenant's usage.
#[derive(Debug, Default)]
struct RateMeters {
    bytes: RateMeter,
    handshakes: RateMeter,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

fn now() -> Instant {
    // Tokio's clock, which tests can pause.
    tokio::time::Instant::now().into_std()
}

impl TenantUsage {
    fn new(tenant: Arc<str>, quota: Quota, counters: Arc<UsageCounters>) -> Arc<Self> {
        let usage = Self {
            tenant,
            limits: Mutex::default(),
            bandwidth: AtomicU64::new(0),
            streams: AtomicU64::new(0),
            bytes: Mutex::default(),
            wait_order: tokio::sync::Mutex::default(),
            handshakes: Mutex::default(),
            used_bytes: AtomicU64::new(0),
            used_handshakes: AtomicU64::new(0),
            rate_meters: Mutex::default(),
            counters,
        };
        usage.allow(quota);
        Arc::new(usage)
    }

    fn allow(&self, quota: Quota) {
        locked(&self.limits).quota = quota;
        self.divide(&[]);
    }

    /// Computes this node's share of the quota from the usage on other nodes.
    fn divide(&self, others: &[Rates]) {
        let mut limits = locked(&self.limits);
        let quota = limits.quota;
        limits.handshakes = quota
            .handshakes
            .map(|quota| share(quota as f64, others.iter().map(|used| used.handshakes)));
        let bandwidth = quota.bandwidth.map_or(0, |quota| {
            let part = share(quota as f64, others.iter().map(|used| used.bytes));
            // A share must be large enough for one frame.
            (part as u64).max(MIN_BANDWIDTH)
        });
        self.bandwidth.store(bandwidth, Ordering::Relaxed);
    }

    /// Measures the usage per second on this node and its fraction of the quota. Returns `None` if
    /// the tenant has no quota per second.
    fn measure(&self, now: Instant) -> Option<(Rates, f64)> {
        let quota = self.quota();
        if quota.bandwidth.is_none() && quota.handshakes.is_none() {
            return None;
        }
        let mut rate_meters = locked(&self.rate_meters);
        let bytes = self.used_bytes.load(Ordering::Relaxed);
        let handshakes = self.used_handshakes.load(Ordering::Relaxed);
        let rates = Rates {
            bytes: rate_meters.bytes.measure(now, bytes),
            handshakes: rate_meters.handshakes.measure(now, handshakes),
        };
        let part = |used: f64, quota: Option<u64>| quota.map_or(0.0, |quota| used / quota as f64);
        let part = part(rates.bytes, quota.bandwidth).max(part(rates.handshakes, quota.handshakes));
        Some((rates, part))
    }

    pub(crate) fn quota(&self) -> Quota {
        locked(&self.limits).quota
    }

    pub(crate) fn streams(&self) -> u64 {
        self.streams.load(Ordering::Relaxed)
    }

    fn refuse(&self, what: &'static str, limit: u64, retry: Option<Duration>) -> QuotaError {
        self.counters.refused.add(1);
        QuotaError {
            tenant: Arc::clone(&self.tenant),
            what,
            limit,
            retry,
        }
    }

    /// Checks the quota for one more environment besides the `there` existing ones.
    pub(crate) fn one_more_environment(&self, there: u64) -> Result<(), QuotaError> {
        match self.quota().environments {
            Some(limit) if there >= limit => Err(self.refuse("environments", limit, None)),
            _ => Ok(()),
        }
    }

    /// Checks the quota for a connect request, with `elsewhere` streams on other nodes. Reserves
    /// nothing, because the harness may not attach.
    pub(crate) fn may_connect(&self, elsewhere: u64) -> Result<(), QuotaError> {
        /// Streams end only when a client closes them; asking more often does not help.
        const LATER: Duration = Duration::from_secs(1);
        let NodeQuota { quota, handshakes } = *locked(&self.limits);
        if let Some(limit) = quota.streams
            && self.streams().saturating_add(elsewhere) >= limit
        {
            return Err(self.refuse("streams", limit, Some(LATER)));
        }
        if let (Some(limit), Some(rate)) = (quota.handshakes, handshakes) {
            let taken = locked(&self.handshakes).take(0, rate, now());
            taken.map_err(|wait| self.refuse("handshakes a second", limit, Some(wait)))?;
        }
        Ok(())
    }

    /// Counts a harness's socket as a stream, if the quota allows one more besides `elsewhere`
    /// streams on other nodes.
    pub(crate) fn add_stream(self: &Arc<Self>, elsewhere: u64) -> Result<StreamSlot, QuotaError> {
        let limit = self.quota().streams;
        let entered = self
            .streams
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |streams| {
                let all = streams.saturating_add(elsewhere);
                (limit.is_none_or(|limit| all < limit)).then_some(streams + 1)
            });
        if entered.is_err() {
            return Err(self.refuse("streams", limit.unwrap_or(0), None));
        }
        self.counters.streams.add(1);
        Ok(StreamSlot(Arc::clone(self)))
    }

    /// Waits until the quota allows `bytes`. Cancel safe.
    async fn wait_for_bytes(&self, bytes: u64) {
        let _turn = self.wait_order.lock().await;
        loop {
            let rate = self.bandwidth.load(Ordering::Relaxed);
            if rate == 0 {
                return;
            }
            let taken = locked(&self.bytes).take(bytes, rate as f64, now());
            let Err(wait) = taken else {
                self.used_bytes.fetch_add(bytes, Ordering::Relaxed);
                return;
            };
            self.counters.waits.add(1);
            tokio::time::sleep(wait).await;
        }
    }

    /// Waits until the quota allows a handshake. Cancel safe.
    async fn wait_for_handshake(&self) {
        loop {
            let Some(rate) = locked(&self.limits).handshakes else {
                return;
            };
            let taken = locked(&self.handshakes).take(1, rate, now());
            let Err(wait) = taken else {
                self.used_handshakes.fetch_add(1, Ordering::Relaxed);
                return;
            };
            self.counters.waits.add(1);
            tokio::time::sleep(wait).await;
        }
    }
}

/// A harness socket counted as a stream of its tenant until dropped.
#[derive(Debug)]
pub(crate) struct StreamSlot(Arc<TenantUsage>);

impl Drop for StreamSlot {
    fn drop(&mut self) {
        self.0.streams.fetch_sub(1, Ordering::Relaxed);
        self.0.counters.streams.sub(1);
    }
}

/// Counts the frames of one socket, and delays them while the quota of the tenant is exhausted.
#[derive(Debug)]
pub(crate) struct FrameMeter {
    usage: Arc<TenantUsage>,
    /// Whether handshake frames count: those of harnesses do, the executor's answers do not.
    handshakes: bool,
}

impl FrameMeter {
    pub(crate) fn new(usage: Arc<TenantUsage>, handshakes: bool) -> Self {
        Self { usage, handshakes }
    }

    /// Counts a frame. Returns whether to wait for [`FrameMeter::wait`] before the frame is forwarded.
    pub(crate) fn count(&self, bytes: usize, kind: FrameKind) -> bool {
        let counters = &self.usage.counters;
        counters.received_bytes.add(bytes as u64);
        let handshake = self.handshakes && kind == FrameKind::Handshake;
        if handshake {
            counters.handshakes.add(1);
        }
        handshake || self.usage.bandwidth.load(Ordering::Relaxed) != 0
    }

    /// Waits until a frame may be forwarded. Cancel safe.
    pub(crate) async fn wait(&self, bytes: usize, kind: FrameKind) {
        if self.handshakes && kind == FrameKind::Handshake {
            self.usage.wait_for_handshake().await;
        }
        self.usage.wait_for_bytes(bytes as u64).await;
    }
}

/// All tenants of a rendezvous server.
#[derive(Debug)]
pub(crate) struct Tenants {
    inner: Mutex<TenantsInUse>,
    /// Maximum number of tenants that are counted separately.
    by_name: usize,
}

/// Tenants in use; the lock is never held across an await.
#[derive(Debug, Default)]
struct TenantsInUse {
    quotas: Quotas,
    usages: HashMap<Arc<str>, Arc<TenantUsage>>,
    /// Counters of the tenants that have their own.
    counters: BTreeMap<Arc<str>, Arc<UsageCounters>>,
    /// Counters of all other tenants.
    other: Arc<UsageCounters>,
}

impl Tenants {
    /// Maximum number of unused tenants kept in memory.
    const REMEMBERED: usize = 4096;

    /// Creates the tenants. Up to `by_name` tenants get separate counters: those with quotas
    /// first, others in order of their first use.
    pub(crate) fn new(quotas: Quotas, by_name: usize) -> Self {
        let mut counters = BTreeMap::new();
        for tenant in [DEFAULT]
            .into_iter()
            .chain(quotas.named.keys().map(String::as_str))
        {
            if counters.len() < by_name {
                counters.insert(tenant.into(), Arc::default());
            }
        }
        Self {
            inner: Mutex::new(TenantsInUse {
                quotas,
                counters,
                ..TenantsInUse::default()
            }),
            by_name,
        }
    }

    pub(crate) fn set_quotas(&self, quotas: Quotas) {
        let mut inner = locked(&self.inner);
        for (tenant, usage) in &inner.usages {
            usage.allow(quotas.of(tenant));
        }
        inner.quotas = quotas;
    }

    /// Measures the usage on this node that is limited per second, and computes this node's shares
    /// of the quotas. `elsewhere` returns a tenant's usage on other nodes. Returns the measured
    /// usage, the tenants closest to their quotas first.
    pub(crate) fn update_quota_shares(
        &self,
        elsewhere: impl Fn(&str) -> Vec<Rates>,
    ) -> Vec<(Arc<str>, Rates)> {
        let usages: Vec<_> = locked(&self.inner).usages.values().cloned().collect();
        let now = now();
        let mut measured = Vec::new();
        for usage in usages {
            if let Some((rates, part)) = usage.measure(now) {
                usage.divide(&elsewhere(&usage.tenant));
                if part > 0.0 {
                    measured.push((part, Arc::clone(&usage.tenant), rates));
                }
            }
        }
        measured.sort_by(|(a, ..), (b, ..)| b.total_cmp(a));
        let measured = measured.into_iter();
        measured.map(|(_, tenant, rates)| (tenant, rates)).collect()
    }

    /// Usage of a tenant.
    pub(crate) fn usage(&self, tenant: &str) -> Arc<TenantUsage> {
        let mut inner = locked(&self.inner);
        if let Some(usage) = inner.usages.get(tenant) {
            return Arc::clone(usage);
        }
        if inner.usages.len() >= Self::REMEMBERED {
            inner.usages.retain(|_, usage| Arc::strong_count(usage) > 1);
        }
        let tenant: Arc<str> = tenant.into();
        let counters = match inner.counters.get(&tenant) {
            Some(counters) => Arc::clone(counters),
            None if inner.counters.len() < self.by_name => {
                let counters = Arc::<UsageCounters>::default();
                inner
                    .counters
                    .insert(Arc::clone(&tenant), Arc::clone(&counters));
                counters
            }
            None => Arc::clone(&inner.other),
        };
        let quota = inner.quotas.of(&tenant);
        let usage = TenantUsage::new(Arc::clone(&tenant), quota, counters);
        inner.usages.insert(tenant, Arc::clone(&usage));
        usage
    }

    /// All counters by tenant; tenants without their own are counted as `other`.
    pub(crate) fn counters(&self) -> Vec<(Arc<str>, Arc<UsageCounters>)> {
        let inner = locked(&self.inner);
        let named = inner.counters.iter();
        let named = named.map(|(name, counters)| (Arc::clone(name), Arc::clone(counters)));
        let other = (OTHER.into(), Arc::clone(&inner.other));
        named.chain([other]).collect()
    }
}

impl fmt::Display for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut space = "";
        for (name, value) in [
            ("environments", self.environments),
            ("streams", self.streams),
            ("bandwidth", self.bandwidth),
            ("handshakes", self.handshakes),
        ] {
            if let Some(value) = value {
                write!(f, "{space}{name}={value}")?;
                space = " ";
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scoped_keeps_environments_of_tenants_apart() {
        assert_eq!(scoped(DEFAULT, "a"), "a");
        assert_eq!(scoped("acme", "a"), "acme/a");
        assert_eq!(split("a"), (DEFAULT, "a"));
        assert_eq!(split("acme/a"), ("acme", "a"));
    }

    #[test]
    fn quotas_parse_names_the_line_and_the_error() {
        let text = "# c\n\nacme environments=2 bandwidth=1M\n* streams=7 handshakes=3\n";
        let quotas: Quotas = text.parse().unwrap();
        let acme = quotas.of("acme");
        assert_eq!(acme.to_string(), "environments=2 bandwidth=1048576");
        assert_eq!(quotas.of("b").to_string(), "streams=7 handshakes=3");
        for (text, line, problem) in [
            ("a/b streams=1", 1, "neither a valid tenant name"),
            ("\na streams", 2, "NAME=NUMBER"),
            ("a cpus=1", 1, "unknown quota `cpus`"),
            ("a streams=x", 1, "expected a number"),
            ("a streams=K", 1, "expected a number"),
            ("a streams=+1", 1, "expected a number"),
            ("a streams=99999999999G", 1, "expected a number"),
            ("a streams=1 streams=2", 1, "twice"),
            ("a bandwidth=1000", 1, "65536 is the least"),
            ("a handshakes=0", 1, "remove the tokens"),
            ("a streams=1\na streams=2", 2, "more than one line for `a`"),
        ] {
            let error = text.parse::<Quotas>().unwrap_err();
            assert_eq!(error.line, line, "{text}");
            assert!(error.problem.contains(problem), "{text}: {error}");
        }
    }

    #[test]
    fn token_bucket_lends_once_and_waits_until_the_debt_is_paid() {
        let start = Instant::now();
        let mut bucket = TokenBucket::default();
        // The bucket holds one second of the rate, and lends beyond that while it is not empty.
        assert_eq!(bucket.take(60, 100.0, start), Ok(()));
        assert_eq!(bucket.take(240, 100.0, start), Ok(()));
        let wait = bucket.take(1, 100.0, start).unwrap_err();
        assert_eq!(wait, Duration::from_secs_f64(2.01));
        assert!(bucket.take(1, 100.0, start + wait).is_ok());
        // The bucket never holds more than one second of the rate.
        let later = start + Duration::from_secs(1000);
        assert_eq!(bucket.take(100, 100.0, later), Ok(()));
        assert!(bucket.take(1, 100.0, later).is_err());
        // With a rate below one per second it holds one.
        let mut slow = TokenBucket::default();
        assert_eq!(slow.take(1, 0.25, start), Ok(()));
        let wait = slow.take(1, 0.25, start).unwrap_err();
        assert_eq!(wait, Duration::from_secs(4));
        assert!(slow.take(1, 0.25, start + wait).is_ok());
    }

    #[test]
    fn stream_slot_counts_until_dropped() {
        let quotas = "a streams=2".parse().unwrap();
        let tenants = Tenants::new(quotas, 8);
        let usage = tenants.usage("a");
        let first = usage.add_stream(0).unwrap();
        let second = usage.add_stream(0).unwrap();
        let error = usage.add_stream(0).unwrap_err().to_string();
        assert_eq!(error, "tenant `a` has reached its quota of 2 streams");
        assert!(usage.may_connect(0).is_err());
        drop(first);
        assert_eq!((usage.streams(), usage.counters.streams.value()), (1, 1));
        drop(usage.add_stream(0).unwrap());
        // A changed quota applies to existing tenants.
        tenants.set_quotas("a streams=1".parse().unwrap());
        assert!(usage.add_stream(0).is_err());
        drop(second);
        drop(usage.add_stream(0).unwrap());
        assert_eq!(usage.counters.refused.value(), 3);
        // Streams on other nodes count too.
        assert!(usage.add_stream(1).is_err() && usage.may_connect(1).is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn meter_delays_bytes_beyond_the_bandwidth_quota() {
        let tenants = Tenants::new("a bandwidth=64K".parse().unwrap(), 8);
        let meter = FrameMeter::new(tenants.usage("a"), false);
        let start = tokio::time::Instant::now();
        // One second of the quota is available immediately, the rest at the rate of the quota.
        for _ in 0..8 {
            assert!(meter.count(32 << 10, FrameKind::Other));
            meter.wait(32 << 10, FrameKind::Other).await;
        }
        let waited = start.elapsed();
        assert!(
            (Duration::from_millis(2400)..Duration::from_millis(3100)).contains(&waited),
            "{waited:?}"
        );
        let other = FrameMeter::new(tenants.usage("b"), false);
        assert!(!other.count(1 << 20, FrameKind::Other));
    }

    #[tokio::test(start_paused = true)]
    async fn handshake_quota_refuses_connects_and_delays_handshakes() {
        let tenants = Tenants::new("a handshakes=2".parse().unwrap(), 8);
        let usage = tenants.usage("a");
        let harness = FrameMeter::new(Arc::clone(&usage), true);
        for _ in 0..2 {
            usage.may_connect(0).unwrap();
            assert!(harness.count(10, FrameKind::Handshake));
            harness.wait(10, FrameKind::Handshake).await;
        }
        let error = usage.may_connect(0).unwrap_err();
        let text = "tenant `a` has reached its quota of 2 handshakes a second";
        assert_eq!(error.to_string(), text);
        tokio::time::sleep(error.retry.unwrap()).await;
        usage.may_connect(0).unwrap();
        // The executor's response to a handshake is not counted.
        let executor = FrameMeter::new(usage, false);
        assert!(!executor.count(10, FrameKind::Handshake));
    }

    #[tokio::test(start_paused = true)]
    async fn usage_on_other_nodes_reduces_the_share_of_this_node() {
        let tenants = Tenants::new("a bandwidth=1M handshakes=9".parse().unwrap(), 8);
        let usage = tenants.usage("a");
        tenants.usage("without");
        let meter = FrameMeter::new(Arc::clone(&usage), true);
        let other = |bytes: u64, handshakes: f64| Rates {
            bytes: bytes as f64,
            handshakes,
        };
        let may = || {
            let handshakes = locked(&usage.limits).handshakes.unwrap();
            (usage.bandwidth.load(Ordering::Relaxed) >> 10, handshakes)
        };
        assert_eq!(may(), (1024, 9.0));
        let busy = |_: &str| vec![other(1 << 20, 9.0), other(1 << 20, 9.0)];
        assert_eq!(tenants.update_quota_shares(busy), []);
        assert_eq!(may(), (341, 3.0));
        // A share always suffices for one frame.
        let busy = |_: &str| vec![other(1 << 20, 0.0); 40];
        tenants.update_quota_shares(busy);
        assert_eq!(may(), (64, 9.0));
        // Reports the usage on this node, half of it after the first measurement.
        tokio::time::advance(Duration::from_secs(1)).await;
        meter.wait(5000, FrameKind::Handshake).await;
        let used = tenants.update_quota_shares(|_| vec![other(24 << 10, 1.0)]);
        assert_eq!(used, [("a".into(), other(2500, 0.5))]);
        assert_eq!(may(), (1000, 8.0));
        // Tenants that use a larger fraction of their quota come first.
        tenants.set_quotas("a handshakes=100\n* handshakes=1".parse().unwrap());
        assert_eq!(may(), (0, 100.0));
        let small = FrameMeter::new(tenants.usage("b"), true);
        tenants.update_quota_shares(|_| Vec::new());
        for _ in 0..3 {
            meter.wait(1, FrameKind::Handshake).await;
        }
        small.wait(1, FrameKind::Handshake).await;
        tokio::time::advance(Duration::from_secs(1)).await;
        let used = tenants.update_quota_shares(|_| Vec::new());
        let order: Vec<_> = used.iter().map(|(tenant, _)| &**tenant).collect();
        assert_eq!(order, ["b", "a"]);
    }

    #[test]
    fn counters_are_limited_and_the_rest_is_counted_as_other() {
        let tenants = Tenants::new("a streams=1".parse().unwrap(), 3);
        for name in ["x", "y", "z"] {
            tenants.usage(name).counters.handshakes.add(1);
        }
        let counted: Vec<_> = tenants
            .counters()
            .into_iter()
            .map(|(name, counters)| (name.to_string(), counters.handshakes.value()))
            .collect();
        let expected = [("a", 0), ("default", 0), ("x", 1), ("other", 2)];
        assert_eq!(
            counted,
            expected.map(|(name, count)| (name.to_owned(), count))
        );
    }
}
