//! `capabilityRoots/discoverV1`: what discovery finds, what it leaves out and what it rejects.

use std::fs;
use std::path::{Path, PathBuf};

use exec_server_testkit::wire::{Transport, WireClient, fields};
use serde_json::{Value, json};

use crate::{over_all, served};

over_all! {
    discovery_finds_plugins_and_skills,
}

fn uri(path: &Path) -> String {
    format!("file://{}", path.display())
}

/// A directory with files.
struct CapabilityTree(tempfile::TempDir);

impl CapabilityTree {
    fn new(files: &[(&str, &str)]) -> Self {
        let tree = Self(tempfile::tempdir().unwrap());
        for (path, text) in files {
            tree.write(path, text.as_bytes());
        }
        tree
    }

    fn path(&self, name: &str) -> PathBuf {
        let root = self.0.path().canonicalize().unwrap();
        if name.is_empty() {
            root
        } else {
            root.join(name)
        }
    }

    fn uri(&self, name: &str) -> String {
        uri(&self.path(name))
    }

    fn write(&self, path: &str, bytes: &[u8]) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    /// A file of this tree, as the response contains it.
    fn expected_file(&self, path: &str) -> Value {
        let contents = fs::read_to_string(self.path(path)).unwrap();
        json!({"path": self.uri(path), "contents": contents})
    }
}

async fn discover(client: &mut WireClient, roots: &[&str]) -> Vec<Value> {
    let roots: Vec<_> = roots
        .iter()
        .map(|path| json!({"id": "r", "path": path}))
        .collect();
    let asked = roots.len();
    let answer = client
        .ok("capabilityRoots/discoverV1", json!({"roots": roots}))
        .await;
    let found = answer["roots"].as_array().unwrap().clone();
    assert_eq!(found.len(), asked, "{answer}");
    found
}

async fn one(client: &mut WireClient, tree: &CapabilityTree, name: &str) -> Value {
    discover(client, &[&tree.uri(name)]).await.remove(0)
}

/// The paths of the skills, below the root.
fn skills(found: &Value) -> Vec<String> {
    let root = found["path"].as_str().unwrap();
    let skills = found["skills"].as_array().unwrap();
    let path = |skill: &Value| skill["instructions"]["path"].as_str().unwrap().to_owned();
    skills
        .iter()
        .map(|skill| {
            path(skill)
                .strip_prefix(root)
                .unwrap()
                .trim_matches('/')
                .to_owned()
        })
        .collect()
}

fn warnings(found: &Value) -> Vec<&str> {
    let warnings = found["warnings"].as_array().unwrap();
    warnings
        .iter()
        .map(|warning| warning.as_str().unwrap())
        .collect()
}

async fn discovery_finds_plugins_and_skills(on: Transport) {
    let (_server, mut client) = served(on).await;
    let info = client.ok("environment/info", Value::Null).await;
    assert_eq!(info["capabilities"]["capabilityDiscoverySandbox"], true);
    let tree = CapabilityTree::new(&[
        (
            ".codex-plugin/plugin.json",
            r#"{"mcpServers":"./m.json","apps":"./a.json"}"#,
        ),
        (".claude-plugin/plugin.json", r#"{"name":"not this one"}"#),
        ("m.json", "{}"),
        ("a.json", "[]"),
        (".mcp.json", "unused"),
        ("SKILL.md", "root"),
        ("skills/b/SKILL.md", "b"),
        ("skills/a b/SKILL.md", "a"),
        ("skills/a b/agents/openai.yaml", "y: 1"),
        (".hidden/SKILL.md", "hidden"),
        ("nested/.cursor-plugin/plugin.json", "{}"),
        ("nested/.claude-plugin/plugin.json", "{\"name\":\"n\"}"),
        ("nested/SKILL.md", "n"),
        ("other/.claude-plugin/other.json", "{}"),
    ]);
    let found = one(&mut client, &tree, "").await;
    let names = [
        "error",
        "id",
        "namespaceManifests",
        "path",
        "plugin",
        "skills",
        "warnings",
    ];
    assert_eq!(fields(&found), names);
    assert_eq!((&found["id"], &found["error"]), (&json!("r"), &Value::Null));
    assert_eq!(found["path"], tree.uri(""));
    assert_eq!(
        found["plugin"],
        json!({
            "manifest": tree.expected_file(".codex-plugin/plugin.json"),
            "mcpConfig": tree.expected_file("m.json"),
            "appsConfig": tree.expected_file("a.json"),
        })
    );
    assert_eq!(
        skills(&found),
        [
            ".hidden/SKILL.md",
            "SKILL.md",
            "nested/SKILL.md",
            "skills/a%20b/SKILL.md",
            "skills/b/SKILL.md"
        ]
    );
    assert_eq!(found["skills"][3]["metadata"]["contents"], "y: 1");
    assert_eq!(found["skills"][4]["metadata"], Value::Null);
    assert_eq!(
        found["namespaceManifests"],
        json!([
            tree.expected_file(".codex-plugin/plugin.json"),
            tree.expected_file("nested/.claude-plugin/plugin.json"),
        ])
    );
    assert_eq!(warnings(&found), [""; 0]);
    // A directory inside a plugin is not reported as a plugin, but its skills name that plugin.
    let found = one(&mut client, &tree, "skills").await;
    assert_eq!(found["plugin"], Value::Null);
    assert_eq!(
        found["namespaceManifests"],
        json!([tree.expected_file(".codex-plugin/plugin.json")])
    );
}

#[tokio::test]
async fn discovery_reads_the_files_that_a_manifest_names() {
    let (_server, mut client) = served(Transport::Websocket).await;
    let by_name = Some(".mcp.json");
    for (manifest, mcp, apps, warned) in [
        ("{}", by_name, None, 0),
        ("not json", by_name, None, 0),
        (r#"{"mcpServers":{"x":1},"apps":{"y":1}}"#, None, None, 0),
        (r#"{"mcpServers":["./m.json"],"apps":5}"#, by_name, None, 0),
        (
            r#"{"mcpServers":"./m.json","apps":"./d/a.json"}"#,
            Some("m.json"),
            Some("d/a.json"),
            0,
        ),
        (
            r#"{"mcpServers":"./missing","apps":"./missing"}"#,
            None,
            None,
            0,
        ),
        (r#"{"mcpServers":"./d","apps":"./d"}"#, None, None, 0),
        (
            r#"{"mcpServers":"m.json","apps":"m.json"}"#,
            by_name,
            None,
            2,
        ),
        (
            r#"{"mcpServers":"./../m.json","apps":"./d/../../m.json"}"#,
            by_name,
            None,
            2,
        ),
        (
            r#"{"mcpServers":"/etc/passwd","apps":"./"}"#,
            by_name,
            None,
            2,
        ),
    ] {
        let tree = CapabilityTree::new(&[
            (".cursor-plugin/plugin.json", manifest),
            (".mcp.json", "by name"),
            ("m.json", "m"),
            ("d/a.json", "a"),
        ]);
        let found = one(&mut client, &tree, "").await;
        let expected_file =
            |path: Option<&str>| path.map_or(Value::Null, |path| tree.expected_file(path));
        assert_eq!(
            found["plugin"]["mcpConfig"],
            expected_file(mcp),
            "{manifest}"
        );
        assert_eq!(
            found["plugin"]["appsConfig"],
            expected_file(apps),
            "{manifest}"
        );
        assert_eq!(warnings(&found).len(), warned, "{found}");
        assert!(warned == 0 || warnings(&found)[0].starts_with("ignoring mcpServers in file://"));
    }
}

#[tokio::test]
async fn discovery_follows_each_directory_link_once() {
    let (_server, mut client) = served(Transport::Websocket).await;
    let tree = CapabilityTree::new(&[("root/SKILL.md", "s"), ("elsewhere/x/SKILL.md", "x")]);
    let link = |to: &str, at: &str| std::os::unix::fs::symlink(to, tree.path(at)).unwrap();
    link("../elsewhere", "root/l");
    link(".", "root/loop");
    link("nowhere", "root/dangling");
    fs::create_dir(tree.path("root/file")).unwrap();
    link("../SKILL.md", "root/file/SKILL.md");
    let found = one(&mut client, &tree, "root").await;
    assert_eq!(skills(&found), ["SKILL.md", "l/x/SKILL.md"], "{found}");
}

#[tokio::test]
async fn discovery_limits_depth_file_size_root_size_and_directories() {
    let (_server, mut client) = served(Transport::Websocket).await;
    // Discovery descends six directories, not seven.
    let tree = CapabilityTree::new(&[
        ("1/2/3/4/5/6/SKILL.md", "in"),
        ("1/2/3/4/5/6/7/SKILL.md", "out"),
    ]);
    let found = one(&mut client, &tree, "").await;
    assert_eq!(skills(&found), ["1/2/3/4/5/6/SKILL.md"]);

    // A file may have 1 MiB; a file that is not UTF-8 is skipped.
    let tree = CapabilityTree::new(&[
        ("a/SKILL.md", &"x".repeat(1 << 20)),
        ("b/SKILL.md", &"x".repeat((1 << 20) + 1)),
    ]);
    tree.write("c/SKILL.md", b"\xff");
    let found = one(&mut client, &tree, "").await;
    assert_eq!(skills(&found), ["a/SKILL.md"]);
    let printed = warnings(&found);
    assert!(
        printed[0].contains("b/SKILL.md") && printed[0].contains("1048576"),
        "{printed:?}"
    );
    assert!(
        printed[1].contains("c/SKILL.md") && printed[1].contains("UTF-8"),
        "{printed:?}"
    );
    assert_eq!(found["error"], Value::Null);

    // 16 MiB of files below one root; a smaller file may still fit afterwards.
    let tree = CapabilityTree::new(&[]);
    for n in 10..26 {
        tree.write(&format!("{n}/SKILL.md"), &vec![b'x'; (1 << 20) - 1]);
    }
    tree.write("30/SKILL.md", &[b'x'; 17]);
    tree.write("31/SKILL.md", &[b'x'; 16]);
    let found = one(&mut client, &tree, "").await;
    assert_eq!(
        (skills(&found).len(), skills(&found)[16].as_str()),
        (17, "31/SKILL.md")
    );
    let printed = warnings(&found);
    assert!(
        printed.len() == 1 && printed[0].contains("16777216"),
        "{printed:?}"
    );

    // At most 2,000 directories per root.
    let tree = CapabilityTree::new(&[("0001/SKILL.md", "near"), ("2500/SKILL.md", "far")]);
    for n in 2..2500 {
        fs::create_dir(tree.path(&format!("{n:04}"))).unwrap();
    }
    let found = one(&mut client, &tree, "").await;
    assert_eq!(skills(&found), ["0001/SKILL.md"]);
    assert!(warnings(&found)[0].contains("traversal limit"), "{found}");
}

#[tokio::test]
async fn discovery_response_is_limited_to_one_message() {
    let (_server, mut client) = served(Transport::Websocket).await;
    let tree = CapabilityTree::new(&[]);
    for n in 0..16 {
        tree.write(&format!("{n}/SKILL.md"), &vec![b'x'; 1 << 20]);
    }
    let same = tree.uri("");
    let roots = [same.as_str(); 5];
    let found = discover(&mut client, &roots).await;
    let errors: Vec<_> = found
        .iter()
        .filter_map(|root| root["error"].as_str())
        .collect();
    // Three roots of 16 MiB fit into one response: the first three.
    let limit = (50 << 20).to_string();
    assert!(
        errors.len() == 2 && errors[0].contains(&limit),
        "{errors:?}"
    );
    assert!(found[..3].iter().all(|root| skills(root).len() == 16));
    // The next request has the whole limit again.
    let found = discover(&mut client, &roots[..1]).await;
    assert_eq!(skills(&found[0]).len(), 16);
}

#[tokio::test]
async fn discovery_reports_errors_per_root_in_request_order() {
    let (mut server, mut client) = served(Transport::Websocket).await;
    let tree = CapabilityTree::new(&[("good/SKILL.md", "s"), ("file", "f")]);
    let uris = [
        tree.uri("file"),
        tree.uri("good"),
        tree.uri("none"),
        "file:///C:/x".to_owned(),
        tree.uri("good"),
    ];
    let found = discover(&mut client, &uris.each_ref().map(String::as_str)).await;
    let error = |at: usize| found[at]["error"].as_str().unwrap_or_default();
    assert_eq!(
        error(0),
        format!("capability root {} is not a directory", uris[0])
    );
    assert_eq!(
        error(2),
        format!(
            "failed to inspect capability root {}: No such file or directory (os error 2)",
            uris[2]
        )
    );
    assert!(error(3).contains("file:///C:/x"), "{}", found[3]);
    for at in [1, 4] {
        assert_eq!((skills(&found[at]).len(), error(at)), (1, ""));
    }
    for (root, uri) in found.iter().zip(&uris) {
        assert_eq!(root["path"], *uri);
    }
    assert_eq!(discover(&mut client, &[]).await, [Value::Null; 0]);
    let many: Vec<&str> = vec![&uris[1]; 128];
    assert_eq!(discover(&mut client, &many).await.len(), 128);

    let method = "capabilityRoots/discoverV1";
    let roots: Vec<_> = (0..129)
        .map(|n| json!({"id": n.to_string(), "path": uris[1]}))
        .collect();
    let refused = client.refused(method, json!({"roots": roots})).await;
    assert_eq!(
        (refused.code, refused.message.as_str()),
        (
            -32600,
            "capability root discovery accepts at most 128 roots"
        )
    );
    for params in [
        json!({}),
        json!({"roots": [{"id": "x", "path": "/native"}]}),
        json!({"roots": [{"path": "file:///"}]}),
    ] {
        assert_eq!(client.refused(method, params).await.code, -32602);
    }
    let mut early = server.connect().await;
    let refused = early.refused(method, json!({"roots": []})).await;
    assert_eq!(
        (refused.code, refused.message.as_str()),
        (
            -32600,
            "client must call initialize before using capability discovery methods"
        )
    );
}
