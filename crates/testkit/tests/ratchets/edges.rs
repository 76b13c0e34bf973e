//! Edges between the crates of the workspace, and libraries that a crate must not reach.

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::Value;

/// Dependencies that each crate may have. A crate that is not listed fails the test, as does a
/// dependency that is not used.
///
/// Dependencies of tests are free, except between `service` and `client`.
const ALLOWED: &[(&str, &[&str])] = &[
    ("agents", &["client", "protocol", "sync", "transport"]),
    (
        "bench",
        &[
            "agents",
            "client",
            "egress",
            "engine",
            "protocol",
            "registry",
            "relay",
            "sync",
            "testkit",
            "transport",
        ],
    ),
    (
        "client",
        &["engine", "protocol", "registry", "sync", "transport"],
    ),
    ("egress", &["protocol", "sync"]),
    ("engine", &["egress", "executor", "protocol", "sync"]),
    (
        "exec-server",
        &[
            "agents",
            "client",
            "egress",
            "engine",
            "executor",
            "protocol",
            "registry",
            "rendezvous",
            "sandbox",
            "service",
            "sync",
            "sys",
            "transport",
        ],
    ),
    ("executor", &["protocol", "sandbox", "sync", "sys"]),
    ("protocol", &[]),
    ("registry", &["relay", "sync", "transport"]),
    ("relay", &[]),
    ("rendezvous", &["relay", "sync", "transport"]),
    ("sandbox", &["protocol", "sync", "sys"]),
    (
        "service",
        &["engine", "protocol", "registry", "sync", "sys", "transport"],
    ),
    ("sync", &[]),
    ("sys", &[]),
    ("testkit", &["sync", "transport"]),
    ("transport", &["protocol", "sync"]),
];

/// Edges that exist but are to be removed, each with what replaces it. Lines may only be removed.
const EXCEPTIONS: &[(&str, &str, &str)] = &[];

type Edge = (String, String);

#[test]
fn crates_depend_only_on_crates_that_the_table_allows() {
    let found = edges(&metadata(), |kind| kind != Some("dev"));
    assert_eq!(compare(&found, ALLOWED, EXCEPTIONS), Vec::<String>::new());
}

#[test]
fn service_and_client_do_not_depend_on_each_other_in_tests_either() {
    let found = edges(&metadata(), |_| true);
    for (from, to) in [("service", "client"), ("client", "service")] {
        assert!(
            !found.contains(&(from.into(), to.into())),
            "{from} depends on {to}"
        );
    }
}

#[test]
fn each_crate_of_the_workspace_is_listed_once() {
    let found: BTreeSet<String> = packages(&metadata())
        .map(|package| name(&package["name"]))
        .collect();
    let listed: Vec<&str> = ALLOWED.iter().map(|(from, _)| *from).collect();
    assert_eq!(listed, found.iter().map(String::as_str).collect::<Vec<_>>());
}

#[test]
fn comparison_reports_new_edges_and_lines_that_are_not_needed() {
    let edge = |from: &str, to: &str| (from.to_owned(), to.to_owned());
    let found = BTreeSet::from([edge("a", "b"), edge("a", "c")]);
    let allowed: &[(&str, &[&str])] = &[("a", &["b"])];
    assert_eq!(
        compare(&found, allowed, &[("a", "c", "")]),
        Vec::<String>::new()
    );
    assert_eq!(
        compare(&found, allowed, &[]),
        ["a depends on c, which the table does not allow"]
    );
    let stale = compare(
        &found,
        &[("a", &["b", "c", "d"])],
        &[("a", "c", ""), ("b", "a", "")],
    );
    assert_eq!(
        stale,
        [
            "a does not depend on d: remove it from the table",
            "a may depend on c: remove the exception",
            "b does not depend on a: remove the exception",
        ]
    );
}

#[test]
fn protocol_relay_and_sandbox_are_built_without_tokio() {
    for package in ["protocol", "relay", "sandbox"] {
        let tree = tree(package, &["--all-features"]);
        assert!(tree.contains("serde v"), "{tree}");
        assert!(!tree.contains("tokio"), "{package}:\n{tree}");
    }
}

#[test]
fn rendezvous_is_built_without_the_code_that_decrypts() {
    let tree = tree("rendezvous", &["--all-features"]);
    let relay: Vec<&str> = tree
        .lines()
        .filter(|line| line.starts_with("exec-server-relay "))
        .collect();
    assert!(!relay.is_empty() && tree.contains("async-nats"), "{tree}");
    for line in relay {
        let features = line.rsplit_once('[').expect("features in brackets").1;
        assert!(!features.contains("noise"), "{line}");
    }
    assert!(!tree.contains("clatter"), "{tree}");
}

#[test]
fn client_without_its_features_reaches_neither_executor_nor_relay() {
    let tree = tree("client", &["--no-default-features"]);
    assert!(tree.contains("exec-server-transport "), "{tree}");
    for package in [
        "egress",
        "engine",
        "executor",
        "relay",
        "rendezvous",
        "service",
    ] {
        assert!(
            !tree.contains(&format!("exec-server-{package} ")),
            "{package}:\n{tree}"
        );
    }
}

#[test]
fn default_binary_is_built_without_nats_and_from_few_crates() {
    /// A rebuilt dependency costs every user time, and each one can have a vulnerability.
    const MOST: usize = 230;
    let tree = tree_of("exec-server", &[]);
    let crates: BTreeSet<&str> = tree
        .lines()
        .map(|line| line.split(" (").next().unwrap_or(line))
        .map(|line| line.split(" [").next().unwrap_or(line))
        .collect();
    assert!(tree.contains("exec-server-rendezvous "), "{tree}");
    assert!(!tree.contains("async-nats"), "{tree}");
    let count = crates.len();
    assert!(count <= MOST, "{count} crates: {crates:#?}");
}

/// Differences between the edges that were found and the table, one text each.
fn compare(
    found: &BTreeSet<Edge>,
    allowed: &[(&str, &[&str])],
    exceptions: &[(&str, &str, &str)],
) -> Vec<String> {
    let owned = |from: &str, to: &str| (from.to_owned(), to.to_owned());
    let allowed: BTreeSet<Edge> = allowed
        .iter()
        .flat_map(|(from, all)| all.iter().map(|to| owned(from, to)))
        .collect();
    let exceptions: BTreeSet<Edge> = exceptions
        .iter()
        .map(|(from, to, _)| owned(from, to))
        .collect();
    let new = found
        .iter()
        .filter(|edge| !allowed.contains(edge) && !exceptions.contains(edge));
    let new =
        new.map(|(from, to)| format!("{from} depends on {to}, which the table does not allow"));
    let unused = allowed.difference(found);
    let unused = unused
        .map(|(from, to)| format!("{from} does not depend on {to}: remove it from the table"));
    let permitted = exceptions.intersection(&allowed);
    let permitted =
        permitted.map(|(from, to)| format!("{from} may depend on {to}: remove the exception"));
    let gone = exceptions.difference(found);
    let gone =
        gone.map(|(from, to)| format!("{from} does not depend on {to}: remove the exception"));
    new.chain(unused).chain(permitted).chain(gone).collect()
}

/// Edges between crates of the workspace, of those kinds of dependency (nothing is the usual one).
fn edges(metadata: &Value, kind: impl Fn(Option<&str>) -> bool) -> BTreeSet<Edge> {
    let mut found = BTreeSet::new();
    for package in packages(metadata) {
        for dependency in package["dependencies"].as_array().expect("dependencies") {
            if dependency["path"].is_string() && kind(dependency["kind"].as_str()) {
                found.insert((name(&package["name"]), name(&dependency["name"])));
            }
        }
    }
    assert!(found.len() > 10, "{found:?}");
    found
}

pub(crate) fn packages(metadata: &Value) -> impl Iterator<Item = &Value> {
    metadata["packages"].as_array().expect("packages").iter()
}

/// The name of a crate's folder.
fn name(package: &Value) -> String {
    let package = package.as_str().expect("name");
    package
        .strip_prefix("exec-server-")
        .unwrap_or(package)
        .to_owned()
}

pub(crate) fn metadata() -> Value {
    let text = cargo(&["metadata", "--no-deps", "--format-version=1", "--locked"]);
    serde_json::from_str(&text).expect("JSON of cargo metadata")
}

/// All that a crate is built from on this system, one line each: name, version and features.
fn tree(package: &str, features: &[&str]) -> String {
    tree_of(&format!("exec-server-{package}"), features)
}

fn tree_of(package: &str, features: &[&str]) -> String {
    let common = [
        "tree",
        "--locked",
        "--prefix=none",
        "--format={p} [{f}]",
        "--edges=normal",
        "--package",
    ];
    cargo(&[&common[..], &[package], features].concat())
}

fn cargo(arguments: &[&str]) -> String {
    let output = Command::new(std::env::var("CARGO").expect("set by cargo"))
        .args(arguments)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        // The features that a user gets, even if those of the workspace are united for this build.
        .env_remove("CARGO_RESOLVER_FEATURE_UNIFICATION")
        .output()
        .expect("cargo");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "cargo {arguments:?}: {errors}");
    String::from_utf8(output.stdout).expect("UTF-8")
}
