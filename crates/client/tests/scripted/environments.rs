//! Environments: connection timing, sharing of sessions, and lifetime of handles.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use exec_server_client::environment::connect::{Connect, ConnectTime};
use exec_server_client::environment::{
    CapturedEnvironment, Environment, EnvironmentEntry, EnvironmentError, EnvironmentList,
    EnvironmentManager, EnvironmentStatus, EnvironmentStep, Readiness, ReadyReport, ReportError,
    SelectedCapabilityRoot,
};
use exec_server_client::executor::{Executor, ExecutorConfig};
use exec_server_client::http::HttpRequest;
use exec_server_client::protocol::PathUri;
use exec_server_client::{
    ExecServerClient, ExecServerClientConnectOptions, ExecServerError, Reply,
};
use exec_server_transport::Link;
use serde_json::json;
use tokio::sync::{Semaphore, watch};

use crate::server::ScriptedServer;

/// Connection target whose sessions report a numbered name.
#[derive(Debug)]
pub(crate) struct NumberedTarget {
    name: &'static str,
    start: ConnectTime,
    /// Number of connection attempts.
    dialled: AtomicUsize,
    /// Errors of the next attempts.
    failures: Mutex<VecDeque<ExecServerError>>,
    /// Permits for attempts to continue.
    permits: Semaphore,
    /// Number of attempts in progress.
    attempts: watch::Sender<usize>,
    /// Number of roots of each received `capabilityRoots/discoverV1`, and the responses to send.
    pub(crate) discoveries: Arc<Discoveries>,
}

/// Received discovery requests and their scripted responses.
#[derive(Debug, Default)]
pub(crate) struct Discoveries {
    pub(crate) requested: Mutex<Vec<usize>>,
    pub(crate) answers: Mutex<VecDeque<ScriptedDiscovery>>,
    pub(crate) capabilities: Mutex<serde_json::Value>,
}

/// Scripted response to one discovery request; without one it succeeds.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ScriptedDiscovery {
    /// Close the connection.
    Cut,
    /// Respond with a different id.
    OtherId,
    OtherPath,
    /// Respond with an empty list.
    Nothing,
    Refused,
}

impl NumberedTarget {
    pub(crate) fn new(name: &'static str) -> Arc<Self> {
        Self::with(name, ConnectTime::AtOnce, Semaphore::MAX_PERMITS)
    }

    /// A machine whose connection attempts wait for a permit.
    fn held(name: &'static str) -> Arc<Self> {
        Self::with(name, ConnectTime::AtOnce, 0)
    }

    fn with(name: &'static str, start: ConnectTime, permits: usize) -> Arc<Self> {
        Arc::new(Self {
            name,
            start,
            dialled: AtomicUsize::new(0),
            failures: Mutex::default(),
            permits: Semaphore::new(permits),
            attempts: watch::channel(0).0,
            discoveries: Arc::default(),
        })
    }

    fn failing(self: Arc<Self>, errors: impl IntoIterator<Item = ExecServerError>) -> Arc<Self> {
        self.failures.lock().unwrap().extend(errors);
        self
    }

    fn dialled(&self) -> usize {
        self.dialled.load(Ordering::SeqCst)
    }

    async fn open(&self) -> Result<ExecServerClient, ExecServerError> {
        let number = self.dialled.fetch_add(1, Ordering::SeqCst) + 1;
        self.attempts.send_modify(|attempts| *attempts += 1);
        let _done = Done(&self.attempts);
        self.permits.acquire().await.unwrap().forget();
        if let Some(error) = self.failures.lock().unwrap().pop_front() {
            return Err(error);
        }
        let (here, there) = Link::pair();
        let name = format!("{}-{number}", self.name);
        let server = ScriptedServer::new(there);
        // The session ends when it is cut, or when the client is dropped.
        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        tokio::spawn(serve(server, name, ended, Arc::clone(&self.discoveries)));
        let client = ExecServerClient::from_link(here, ExecServerClientConnectOptions::new("t"));
        let client = client.await?;
        ENDS.with(|ends| ends.borrow_mut().push(end));
        Ok(client)
    }

    /// Ends all sessions of this test.
    fn cut_all() {
        ENDS.with(|ends| ends.borrow_mut().clear());
    }
}

thread_local! {
    /// Thread-local, because each test and its servers run on one thread.
    static ENDS: std::cell::RefCell<Vec<tokio::sync::oneshot::Sender<()>>> =
        const { std::cell::RefCell::new(Vec::new()) };
}

struct Done<'a>(&'a watch::Sender<usize>);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|attempts| *attempts -= 1);
    }
}

/// Serves one session of a machine.
async fn serve(
    mut server: ScriptedServer,
    name: String,
    ended: tokio::sync::oneshot::Receiver<()>,
    discoveries: Arc<Discoveries>,
) {
    let mut info = json!({"shell": {"name": name, "path": "/bin/sh"}});
    let capabilities = discoveries.capabilities.lock().unwrap().clone();
    if capabilities.is_object() {
        info["capabilities"] = capabilities;
    }
    let serving = async {
        while let Some(message) = server.next().await {
            let result = match message["method"].as_str().unwrap() {
                "initialize" => json!({"sessionId": name, "environmentInfo": info}),
                "environment/status" => json!({"status": "ready"}),
                "initialized" => continue,
                "http/request" => json!({"status": 204, "headers": [], "bodyBase64": ""}),
                "capabilityRoots/discoverV1" => match discoveries.answer(&message["params"]) {
                    Some(Ok(answer)) => answer,
                    Some(Err(code)) => {
                        let error = json!({"code": code, "message": "no"});
                        server
                            .send(json!({"id": message["id"], "error": error}))
                            .await;
                        continue;
                    }
                    None => return,
                },
                other => panic!("{other}"),
            };
            server
                .send(json!({"id": message["id"], "result": result}))
                .await;
        }
    };
    tokio::select! {
        () = serving => {}
        _ = ended => {}
    }
}

impl Discoveries {
    /// The response to send: a result, or an error code. `None` to close the connection.
    fn answer(&self, params: &serde_json::Value) -> Option<Result<serde_json::Value, i64>> {
        let roots = params["roots"].as_array().unwrap();
        self.requested.lock().unwrap().push(roots.len());
        let how = self.answers.lock().unwrap().pop_front();
        let told = |root: &serde_json::Value| {
            let mut told = json!({"id": root["id"], "path": root["path"]});
            match how {
                Some(ScriptedDiscovery::OtherId) => told["id"] = json!("other"),
                Some(ScriptedDiscovery::OtherPath) => told["path"] = json!("file:///other"),
                _ => {}
            }
            told
        };
        match how {
            Some(ScriptedDiscovery::Cut) => None,
            Some(ScriptedDiscovery::Refused) => Some(Err(-32601)),
            Some(ScriptedDiscovery::Nothing) => Some(Ok(json!({"roots": []}))),
            _ => Some(Ok(
                json!({"roots": roots.iter().map(told).collect::<Vec<_>>()}),
            )),
        }
    }

    pub(crate) fn requested(&self) -> Vec<usize> {
        self.requested.lock().unwrap().clone()
    }
}

impl Connect for NumberedTarget {
    fn connect(&self) -> Reply<'_, ExecServerClient> {
        Box::pin(self.open())
    }

    fn target(&self) -> String {
        format!("test://{}", self.name)
    }

    fn start(&self) -> ConnectTime {
        self.start
    }
}

pub(crate) fn entry(id: &str, machine: &Arc<NumberedTarget>) -> EnvironmentEntry {
    EnvironmentEntry::new(id, Arc::clone(machine) as Arc<dyn Connect>)
}

pub(crate) fn list(default: Option<&str>, entries: Vec<EnvironmentEntry>) -> EnvironmentList {
    let mut list = EnvironmentList::default();
    list.environments = entries;
    list.default = default.map(str::to_owned);
    list
}

fn local() -> Environment {
    Environment::local(Executor::new(ExecutorConfig::default()).unwrap())
}

/// Name of the session that responds.
pub(crate) async fn named(environment: &Environment) -> String {
    environment.info().await.unwrap().shell.name
}

fn lasting() -> ExecServerError {
    ExecServerError::Unsupported("everything")
}

fn passing() -> ExecServerError {
    ExecServerError::Closed("for now".into())
}

#[tokio::test]
async fn environments_keep_list_order_after_changes() {
    let machines = ["c", "a", "b"].map(NumberedTarget::new);
    let entries = vec![
        entry("c", &machines[0]),
        entry("a", &machines[1]),
        entry("b", &machines[2]),
    ];
    let mut all = list(Some("b"), entries);
    all.include_local = true;
    let manager = EnvironmentManager::resting(all, Some(local())).unwrap();
    let ids = || -> Vec<String> {
        let handles = manager.environments();
        handles
            .iter()
            .map(|handle| handle.id().to_owned())
            .collect()
    };
    assert_eq!(ids(), ["local", "c", "a", "b"]);
    assert_eq!(manager.default_ids(), ["b", "local", "c", "a"]);
    let connect = machines[1].clone();
    manager.add("c", connect.clone()).unwrap();
    manager.add("new", connect).unwrap();
    assert_eq!(ids(), ["local", "c", "a", "b", "new"]);
    manager.set_default(Some("local")).unwrap();
    assert!(!manager.default_environment().unwrap().is_remote());
    manager.remove("a").unwrap();
    assert_eq!(manager.default_ids(), ["local", "c", "b", "new"]);
    manager.set_default(None).unwrap();
    assert!(manager.default_environment().is_none() && manager.default_ids().is_empty());
    assert!(matches!(
        manager.set_default(Some("a")),
        Err(EnvironmentError::Unknown(_))
    ));
    assert!(matches!(
        manager.remove("a"),
        Err(EnvironmentError::Unknown(_))
    ));
    assert!(manager.remove("local").is_err());
}

#[tokio::test]
async fn manager_rejects_invalid_lists_and_ids() {
    let machine = NumberedTarget::new("a");
    let mut with_local = list(None, Vec::new());
    with_local.include_local = true;
    let refused = EnvironmentManager::new(with_local, None);
    assert!(matches!(refused, Err(EnvironmentError::NoLocal)));
    let refused = EnvironmentManager::new(list(Some("x"), Vec::new()), None);
    assert!(matches!(refused, Err(EnvironmentError::Unknown(id)) if id == "x"));
    let manager = EnvironmentManager::new(list(None, Vec::new()), None).unwrap();
    for bad in ["", "a b", "local", "none", "NONE", "ä"] {
        let connect = machine.clone();
        assert!(
            matches!(manager.add(bad, connect), Err(EnvironmentError::Id(_))),
            "{bad}"
        );
        assert!(manager.prepared(bad).is_err(), "{bad}");
        assert!(manager.report_failed(bad, "x").is_err(), "{bad}");
    }
    assert!(manager.environments().is_empty());
}

#[tokio::test]
async fn url_targets_connect_immediately_and_programs_on_first_use() {
    let dialled = NumberedTarget::new("dialled");
    let program = NumberedTarget::with("program", ConnectTime::OnUse, Semaphore::MAX_PERMITS);
    let entries = vec![entry("dialled", &dialled), entry("program", &program)];
    let manager = EnvironmentManager::new(list(None, entries), None).unwrap();
    let handle = manager.get("dialled").unwrap();
    assert!(matches!(handle.readiness(), Readiness::Starting));
    handle.ready().await.unwrap();
    assert!(handle.readiness().is_ready());
    let other = manager.get("program").unwrap();
    assert!(matches!(other.readiness(), Readiness::Idle));
    assert_eq!((dialled.dialled(), program.dialled()), (1, 0));
    assert_eq!(named(&other).await, "program-1");
    // Without a tokio runtime `add` does not connect, and does not fail.
    let (machine, clone) = (NumberedTarget::new("x"), manager.clone());
    let connect = machine.clone();
    let added = std::thread::spawn(move || clone.add("x", connect).unwrap())
        .join()
        .unwrap();
    assert_eq!(machine.dialled(), 0);
    assert_eq!(named(&added).await, "x-1");
}

#[tokio::test]
async fn concurrent_first_uses_share_one_session() {
    let machine = NumberedTarget::held("a");
    let manager =
        EnvironmentManager::resting(list(None, vec![entry("a", &machine)]), None).unwrap();
    let users: Vec<_> = (0..50)
        .map(|_| {
            let handle = manager.get("a").unwrap();
            tokio::spawn(async move { named(&handle).await })
        })
        .collect();
    // All users have requested the session before the attempt may continue.
    let mut attempts = machine.attempts.subscribe();
    attempts.wait_for(|attempts| *attempts == 1).await.unwrap();
    tokio::task::yield_now().await;
    machine.permits.add_permits(100);
    for user in users {
        assert_eq!(user.await.unwrap(), "a-1");
    }
    assert_eq!(machine.dialled(), 1);
}

#[tokio::test]
async fn connection_failure_is_shared_and_transient_one_retried() {
    let machine = NumberedTarget::held("a").failing([passing(), lasting()]);
    let handle = Arc::new(Environment::remote("a", machine.clone()));
    let users: Vec<_> = (0..10)
        .map(|_| {
            let handle = Arc::clone(&handle);
            tokio::spawn(async move { handle.ready().await })
        })
        .collect();
    let mut attempts = machine.attempts.subscribe();
    attempts.wait_for(|attempts| *attempts == 1).await.unwrap();
    machine.permits.add_permits(1);
    for user in users {
        let error = user.await.unwrap().unwrap_err();
        assert!(matches!(&error, ExecServerError::Environment { id, .. } if id == "a"));
        assert!(error.is_transient());
    }
    assert_eq!(machine.dialled(), 1);
    assert!(matches!(handle.readiness(), Readiness::Failed(_)));
    // The next use retries, and fails permanently.
    machine.permits.add_permits(10);
    assert!(!handle.ready().await.unwrap_err().is_transient());
    assert!(handle.ready().await.is_err());
    handle.begin();
    assert_eq!(machine.dialled(), 2);
}

#[tokio::test]
async fn lost_session_is_replaced_on_next_use() {
    let machine = NumberedTarget::new("a");
    let handle = Environment::remote("a", machine.clone());
    assert_eq!(named(&handle).await, "a-1");
    let mut closed = handle.client().await.unwrap().closed();
    NumberedTarget::cut_all();
    closed.wait_for(Option::is_some).await.unwrap();
    assert!(matches!(handle.readiness(), Readiness::Failed(_)));
    assert!(matches!(
        handle.status().await,
        EnvironmentStatus::Disconnected { .. }
    ));
    assert_eq!(named(&handle).await, "a-2");
    assert_eq!(handle.status().await, EnvironmentStatus::Ready);
}

#[tokio::test]
async fn http_requests_are_sent_by_the_environment() {
    let machine = NumberedTarget::new("a");
    let handle = Environment::remote("a", machine.clone());
    let request = HttpRequest::get("http://intranet/");
    assert_eq!(
        handle.http().fetch(request.clone()).await.unwrap().status,
        204
    );
    assert_eq!(machine.dialled(), 1);
    let here = local();
    let parts = Environment::from_parts("mine", here.exec(), here.files());
    let refused = parts.http().fetch(request.clone()).await;
    assert!(matches!(refused, Err(ExecServerError::Unsupported(_))));
    let parts = parts.with_http(handle.http());
    assert_eq!(parts.http().fetch(request).await.unwrap().status, 204);
}

#[tokio::test]
async fn status_probe_never_connects() {
    let machine = NumberedTarget::held("a").failing([lasting()]);
    let handle = Environment::remote("a", machine.clone());
    assert_eq!(handle.status().await, EnvironmentStatus::Pending);
    assert!(matches!(handle.readiness(), Readiness::Idle));
    assert_eq!(machine.dialled(), 0);
    handle.begin();
    assert_eq!(handle.status().await, EnvironmentStatus::Pending);
    machine.permits.add_permits(1);
    handle.ready().await.unwrap_err();
    let EnvironmentStatus::Disconnected { error } = handle.status().await else {
        panic!("it cannot be ready");
    };
    assert!(error.contains("everything"), "{error}");
    assert_eq!(local().status().await, EnvironmentStatus::Ready);
    assert_eq!(local().target(), None);
    assert_eq!(handle.target().as_deref(), Some("test://a"));
}

#[tokio::test]
async fn dropping_the_last_handle_aborts_the_attempt() {
    let machine = NumberedTarget::held("a");
    let handle = Environment::remote("a", machine.clone());
    handle.begin();
    let mut attempts = machine.attempts.subscribe();
    attempts.wait_for(|attempts| *attempts == 1).await.unwrap();
    drop(handle);
    let ended = attempts.wait_for(|attempts| *attempts == 0);
    tokio::time::timeout(Duration::from_secs(30), ended)
        .await
        .unwrap()
        .unwrap();
}

#[tokio::test]
async fn replaced_handle_remains_usable_for_its_holders() {
    let [first, second] = [NumberedTarget::new("first"), NumberedTarget::held("second")];
    let manager = EnvironmentManager::new(list(Some("w"), vec![entry("w", &first)]), None).unwrap();
    let held = manager.get("w").unwrap();
    let work = manager.attach(["w"]);
    work.settled().await;
    let step = work.step();
    let pinned = |step: &EnvironmentStep| match step.get("w") {
        Some(CapturedEnvironment::Ready(handle)) => Arc::clone(handle),
        other => panic!("{other:?}"),
    };
    let handle = pinned(&step);
    let added = manager.add("w", second.clone()).unwrap();
    // The step, its attachments and holders of the old handle continue to use it.
    assert!(Arc::ptr_eq(&handle, &held) && Arc::ptr_eq(&handle, &pinned(&work.step())));
    assert_eq!(named(&handle).await, "first-1");
    let roots = [root("r", "w")];
    let resolved = step.resolve_roots(&manager, &roots).await;
    assert!(Arc::ptr_eq(&resolved[0].environment, &held));
    // Later captures get the new handle. It is not ready just because the old one was.
    assert!(Arc::ptr_eq(&manager.get("w").unwrap(), &added));
    assert!(Arc::ptr_eq(&manager.default_environment().unwrap(), &added));
    let later = manager.attach(["w"]);
    assert!(matches!(
        later.step().get("w"),
        Some(CapturedEnvironment::Starting)
    ));
    assert!(
        later
            .step()
            .resolve_roots(&manager, &roots)
            .await
            .is_empty()
    );
    second.permits.add_permits(1);
    later.settled().await;
    assert!(Arc::ptr_eq(&pinned(&later.step()), &added));
    assert_eq!(named(&added).await, "second-1");
    let removed = manager.remove("w").unwrap();
    assert!(manager.get("w").is_none() && manager.default_id().is_none());
    assert_eq!(named(&removed).await, "second-1");
}

#[tokio::test]
async fn step_captures_starting_and_omits_failed_environments() {
    let [good, slow] = [NumberedTarget::new("good"), NumberedTarget::held("slow")];
    let bad = NumberedTarget::new("bad").failing([lasting()]);
    let entries = vec![
        entry("bad", &bad),
        entry("slow", &slow),
        entry("good", &good),
    ];
    let mut all = list(None, entries);
    all.include_local = true;
    let manager = EnvironmentManager::new(all, Some(local())).unwrap();
    let work = manager.attach(["good", "nobody", "slow", "bad", "local"]);
    for id in ["good", "bad"] {
        let _ = manager.get(id).unwrap().ready().await;
    }
    let step = work.step();
    let seen: Vec<_> = step
        .captured()
        .map(|(id, captured)| (id, matches!(captured, CapturedEnvironment::Ready(_))))
        .collect();
    assert_eq!(seen, [("good", true), ("slow", false), ("local", true)]);
    let ready: Vec<_> = step.ready().map(|handle| handle.id()).collect();
    assert_eq!(ready, ["good", "local"]);
    // The starting environment may be ready in the next step; this step does not change.
    slow.permits.add_permits(1);
    work.settled().await;
    assert!(matches!(
        step.get("slow"),
        Some(CapturedEnvironment::Starting)
    ));
    assert!(matches!(
        work.step().get("slow"),
        Some(CapturedEnvironment::Ready(_))
    ));
}

pub(crate) fn root(id: &str, environment: &str) -> SelectedCapabilityRoot {
    let path = PathUri::parse("file:///opt/plugin").unwrap();
    SelectedCapabilityRoot::new(id, environment, path)
}

#[tokio::test]
async fn resolve_roots_prefers_captured_handles_over_current_ones() {
    let [captured, starting, outside, idle] = [
        NumberedTarget::new("captured"),
        NumberedTarget::held("starting"),
        NumberedTarget::new("outside"),
        NumberedTarget::held("idle"),
    ];
    let flaky = NumberedTarget::new("flaky").failing([passing()]);
    let broken = NumberedTarget::new("broken").failing([lasting()]);
    let entries = vec![
        entry("captured", &captured),
        entry("starting", &starting),
        entry("outside", &outside),
        entry("idle", &idle),
        entry("flaky", &flaky),
        entry("broken", &broken),
    ];
    let manager = EnvironmentManager::resting(list(None, entries), None).unwrap();
    let work = manager.attach(["captured", "starting"]);
    for id in ["captured", "outside", "flaky", "broken"] {
        let _ = manager.get(id).unwrap().ready().await;
    }
    let step = work.step();
    let roots = [
        root("1", "broken"),
        root("2", "flaky"),
        root("3", "starting"),
        root("4", "captured"),
        root("5", "idle"),
        root("6", "missing"),
        root("7", "outside"),
        root("8", "flaky"),
    ];
    let resolved = step.resolve_roots(&manager, &roots).await;
    let seen: Vec<_> = resolved
        .iter()
        .map(|found| (found.root.id.as_str(), found.environment.id()))
        .collect();
    // The order is kept. The transient failure was retried once for both of its roots.
    assert_eq!(
        seen,
        [
            ("2", "flaky"),
            ("4", "captured"),
            ("7", "outside"),
            ("8", "flaky")
        ]
    );
    assert_eq!((flaky.dialled(), broken.dialled()), (2, 1));
    // The unused environment began to connect, and is available to a later step.
    let mut attempts = idle.attempts.subscribe();
    attempts.wait_for(|attempts| *attempts == 1).await.unwrap();
    idle.permits.add_permits(1);
    manager.get("idle").unwrap().ready().await.unwrap();
    let resolved = step.resolve_roots(&manager, &roots[4..5]).await;
    assert_eq!(named(&resolved[0].environment).await, "idle-1");
}

#[tokio::test]
async fn inspect_roots_does_not_connect() {
    let [good, idle] = [NumberedTarget::new("good"), NumberedTarget::new("idle")];
    let bad = NumberedTarget::new("bad").failing([lasting()]);
    let entries = vec![
        entry("good", &good),
        entry("idle", &idle),
        entry("bad", &bad),
    ];
    let manager = EnvironmentManager::resting(list(None, entries), None).unwrap();
    for id in ["good", "bad"] {
        let _ = manager.get(id).unwrap().ready().await;
    }
    let roots = [
        root("1", "idle"),
        root("2", "bad"),
        root("3", "gone"),
        root("4", "good"),
        root("5", "bad"),
    ];
    let inspection = manager.inspect_roots(&roots);
    assert_eq!(inspection.ready_roots.len(), 1);
    assert_eq!(inspection.ready_roots[0].root.id, "4");
    assert_eq!(
        inspection.warnings,
        [
            "selected capability environment `bad` is unavailable: this server does not support `everything`",
            "selected capability root `3` references unavailable environment `gone`",
        ]
    );
    assert_eq!((idle.dialled(), bad.dialled()), (0, 1));
}

#[tokio::test]
async fn prepared_environment_waits_for_its_report() {
    let machine = NumberedTarget::new("vm");
    let manager = EnvironmentManager::new(list(None, Vec::new()), None).unwrap();
    let handle = manager.prepared("vm").unwrap();
    assert!(Arc::ptr_eq(&handle, &manager.prepared("vm").unwrap()));
    assert!(matches!(handle.readiness(), Readiness::Idle) && handle.target().is_none());
    let work = manager.attach(["vm"]);
    assert!(matches!(
        work.step().get("vm"),
        Some(CapturedEnvironment::Starting)
    ));
    let mut report = ReadyReport::new(machine.clone());
    report.roots = vec![root("plugin@1", "vm")];
    manager.report_ready("vm", report.clone()).unwrap();
    work.settled().await;
    assert_eq!(named(&handle).await, "vm-1");
    assert_eq!(handle.target().as_deref(), Some("test://vm"));
    assert_eq!(handle.roots(), [root("plugin@1", "vm")]);
    // A repeated report is accepted; a contradicting one is rejected.
    manager.report_ready("vm", report).unwrap();
    let refused = manager.report_failed("vm", "too late");
    assert!(matches!(
        refused,
        Err(EnvironmentError::Report {
            source: ReportError::IsReady,
            ..
        })
    ));
    assert_eq!(machine.dialled(), 1);
}

#[tokio::test]
async fn early_reports_are_kept_and_invalid_ones_rejected() {
    let machine = NumberedTarget::new("vm");
    let ready = || ReadyReport::new(machine.clone());
    let ordinary = NumberedTarget::new("ordinary");
    let manager =
        EnvironmentManager::resting(list(None, vec![entry("ordinary", &ordinary)]), None).unwrap();
    // The report arrives before the environment is requested.
    manager.report_ready("early", ready()).unwrap();
    assert!(manager.get("early").is_none());
    assert_eq!(named(&manager.prepared("early").unwrap()).await, "vm-1");
    // The first reason is kept.
    manager.report_failed("lost", "no room").unwrap();
    manager.report_failed("lost", "something else").unwrap();
    let refused = manager
        .report_ready("lost", ready())
        .unwrap_err()
        .to_string();
    assert!(
        refused.contains("`lost`") && refused.contains("no room"),
        "{refused}"
    );
    let lost = manager.prepared("lost").unwrap();
    let error = lost.ready().await.unwrap_err();
    assert!(!error.is_transient());
    let EnvironmentStatus::Disconnected { error } = lost.status().await else {
        panic!("it cannot be ready");
    };
    assert!(
        error.contains("no room") && !error.contains("something else"),
        "{error}"
    );
    // Other environments ignore reports, and `prepared` rejects their ids.
    manager.report_failed("ordinary", "no").unwrap();
    manager.report_ready("ordinary", ready()).unwrap();
    assert_eq!(named(&manager.get("ordinary").unwrap()).await, "ordinary-1");
    let refused = manager.prepared("ordinary");
    assert!(matches!(
        refused,
        Err(EnvironmentError::ProvisioningModeConflict(_))
    ));

    // An invalid report makes a pending environment fail, and creates no environment.
    let many = (0..257).map(|n| root(&n.to_string(), "bad")).collect();
    for (roots, says) in [
        (vec![root(" ", "bad")], "no id"),
        (
            vec![root("a", "bad"), root("a", "bad")],
            "two capability roots `a`",
        ),
        (vec![root("a", "other")], "`other`"),
        (many, "more than 256"),
    ] {
        let manager = EnvironmentManager::new(list(None, Vec::new()), None).unwrap();
        let mut report = ready();
        report.roots = roots;
        let error = manager
            .report_ready("bad", report.clone())
            .unwrap_err()
            .to_string();
        assert!(error.contains(says), "{error}");
        assert!(manager.get("bad").is_none());
        let error = manager.prepared("bad").unwrap().ready().await.unwrap_err();
        assert!(
            matches!(error, ExecServerError::Environment { .. }),
            "{error}"
        );
        // An invalid report after a valid one changes nothing.
        let other = manager.prepared("fine").unwrap();
        manager.report_ready("fine", ready()).unwrap();
        assert!(manager.report_ready("fine", report).is_err());
        other.ready().await.unwrap();
    }
}
