//! Capability discovery: cached results and repeated requests.

use exec_server_client::ExecServerError;
use exec_server_client::environment::{
    CapabilityCache, DiscoveredRoots, Environment, EnvironmentManager, EnvironmentStep,
    ResolvedCapabilityRoot, SelectedCapabilityRoot,
};
use exec_server_client::executor::{Executor, ExecutorConfig};
use exec_server_client::fs::uri;
use exec_server_client::protocol::sandbox::Sandbox;
use serde_json::json;

use crate::environments::{NumberedTarget, ScriptedDiscovery, entry, list, root};

async fn resolved(
    manager: &EnvironmentManager,
    roots: &[SelectedCapabilityRoot],
) -> Vec<ResolvedCapabilityRoot> {
    for root in roots {
        manager
            .get(root.environment_id())
            .unwrap()
            .ready()
            .await
            .unwrap();
    }
    EnvironmentStep::default()
        .resolve_roots(manager, roots)
        .await
}

fn errors(found: &DiscoveredRoots) -> Vec<Option<String>> {
    found
        .iter()
        .map(|(_, outcome)| outcome.err().map(ToString::to_string))
        .collect()
}

#[tokio::test]
async fn new_handle_of_same_environment_uses_cached_results() {
    let [first, second, other] = [
        NumberedTarget::new("first"),
        NumberedTarget::new("second"),
        NumberedTarget::new("other"),
    ];
    let entries = vec![entry("w", &first), entry("o", &other)];
    let manager = EnvironmentManager::resting(list(None, entries), None).unwrap();
    let cache = CapabilityCache::new();
    let roots = [root("a", "w"), root("b", "o"), root("c", "w")];
    let found = cache
        .discover(&resolved(&manager, &roots).await, None)
        .await;
    let ids: Vec<_> = found
        .iter()
        .map(|(root, found)| (root.root.id.clone(), found.unwrap().id.clone()))
        .collect();
    assert_eq!(
        ids,
        [
            ("a".into(), "a".into()),
            ("b".into(), "b".into()),
            ("c".into(), "c".into())
        ]
    );
    // One request per environment.
    assert_eq!(
        (first.discoveries.requested(), other.discoveries.requested()),
        (vec![2], vec![1])
    );
    manager.add("w", second.clone()).unwrap();
    let again = cache
        .discover(&resolved(&manager, &roots).await, None)
        .await;
    assert_eq!(errors(&again), [None, None, None]);
    assert!(!again.recovered());
    assert!(second.discoveries.requested().is_empty());
    // A different path, id or policy is a different root.
    let moved = SelectedCapabilityRoot::new("a", "w", uri("/elsewhere").unwrap());
    let more = [moved, root("a2", "w"), root("a", "w")];
    cache.discover(&resolved(&manager, &more).await, None).await;
    assert_eq!(second.discoveries.requested(), [2]);
}

#[tokio::test]
async fn transient_discovery_failure_is_retried_and_permanent_one_kept() {
    for (answers, lasting) in [
        (vec![ScriptedDiscovery::OtherId], true),
        (vec![ScriptedDiscovery::OtherPath], true),
        (vec![ScriptedDiscovery::Nothing], true),
        (vec![ScriptedDiscovery::Refused], true),
        // A single lost connection is retried internally, so it takes two to make the call fail.
        (vec![ScriptedDiscovery::Cut, ScriptedDiscovery::Cut], false),
    ] {
        let machine = NumberedTarget::new("m");
        let count = answers.len();
        machine
            .discoveries
            .answers
            .lock()
            .unwrap()
            .extend(answers.clone());
        let manager =
            EnvironmentManager::resting(list(None, vec![entry("m", &machine)]), None).unwrap();
        let cache = CapabilityCache::new();
        let roots = [root("a", "m")];
        let first = cache
            .discover(&resolved(&manager, &roots).await, None)
            .await;
        assert!(errors(&first)[0].is_some(), "{answers:?}");
        let second = cache
            .discover(&resolved(&manager, &roots).await, None)
            .await;
        assert_eq!(errors(&second)[0].is_some(), lasting, "{answers:?}");
        assert_eq!(second.recovered(), !lasting, "{answers:?}");
        let requested = machine.discoveries.requested().len();
        assert_eq!(
            requested,
            if lasting { count } else { count + 1 },
            "{answers:?}"
        );
        // An earlier step keeps its result.
        assert!(errors(&first)[0].is_some());
    }
    let machine = NumberedTarget::new("m");
    machine
        .discoveries
        .answers
        .lock()
        .unwrap()
        .push_back(ScriptedDiscovery::Cut);
    let manager =
        EnvironmentManager::resting(list(None, vec![entry("m", &machine)]), None).unwrap();
    let roots = resolved(&manager, &[root("a", "m")]).await;
    let found = CapabilityCache::new().discover(&roots, None).await;
    assert_eq!(errors(&found), [None]);
}

#[tokio::test]
async fn concurrent_discovery_of_many_roots_is_split_and_shared() {
    let machine = NumberedTarget::new("m");
    let manager =
        EnvironmentManager::resting(list(None, vec![entry("m", &machine)]), None).unwrap();
    let roots: Vec<_> = (0..300).map(|n| root(&n.to_string(), "m")).collect();
    let roots = resolved(&manager, &roots).await;
    let cache = CapabilityCache::new();
    let (one, other) = tokio::join!(cache.discover(&roots, None), cache.discover(&roots, None));
    assert!(
        errors(&one)
            .iter()
            .chain(&errors(&other))
            .all(Option::is_none)
    );
    assert_eq!(machine.discoveries.requested(), [128, 128, 44]);
}

#[tokio::test]
async fn discovery_with_policy_requires_server_support() {
    let sandbox: Sandbox = serde_json::from_value(json!({
        "permissions": {"type": "disabled"}, "windowsSandboxLevel": "disabled",
    }))
    .unwrap();
    for can in [false, true] {
        let machine = NumberedTarget::new("m");
        *machine.discoveries.capabilities.lock().unwrap() =
            json!({"capabilityDiscoverySandbox": can});
        let manager =
            EnvironmentManager::resting(list(None, vec![entry("m", &machine)]), None).unwrap();
        let roots = resolved(&manager, &[root("a", "m")]).await;
        let cache = CapabilityCache::new();
        let found = cache.discover(&roots, Some(&sandbox)).await;
        let (_, outcome) = found.iter().next().unwrap();
        assert_eq!(outcome.is_ok(), can);
        if !can {
            let wanted = "capabilityDiscoverySandbox";
            assert!(matches!(outcome, Err(ExecServerError::Unsupported(what)) if *what == wanted));
        }
        // Without a policy, discovery is a separate request.
        assert_eq!(errors(&cache.discover(&roots, None).await), [None]);
        assert_eq!(
            machine.discoveries.requested().len(),
            if can { 2 } else { 1 }
        );
    }
}

#[tokio::test]
async fn local_environment_discovers_without_a_server() {
    let here = Environment::local(Executor::new(ExecutorConfig::default()).unwrap());
    let mut all = list(None, Vec::new());
    all.include_local = true;
    let manager = EnvironmentManager::new(all, Some(here)).unwrap();
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir(directory.path().join("s")).unwrap();
    std::fs::write(directory.path().join("s/SKILL.md"), "here").unwrap();
    let good = SelectedCapabilityRoot::new("good", "local", uri(directory.path()).unwrap());
    let bad = SelectedCapabilityRoot::new("bad", "local", uri("/nonexistent").unwrap());
    let roots = resolved(&manager, &[good, bad]).await;
    let found = CapabilityCache::new().discover(&roots, None).await;
    let found: Vec<_> = found
        .iter()
        .map(|(_, outcome)| outcome.unwrap().clone())
        .collect();
    assert_eq!(found[0].skills[0].instructions.contents, "here");
    assert!(
        found[1]
            .error
            .as_ref()
            .unwrap()
            .contains("file:///nonexistent")
    );
}
