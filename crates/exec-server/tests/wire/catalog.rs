//! `capabilities/discoverV2`: the plugins and skills that are installed on the server's machine.

use std::path::Path;

use exec_server_testkit::wire::{TestedServer, Transport, WireClient};
use serde_json::{Value, json};

use crate::program;

const METHOD: &str = "capabilities/discoverV2";

const WARNING: &str = "some capability metadata could not be loaded; discovery may be incomplete";

/// Files of a configuration directory that contains what a catalog lists and what it leaves out.
const FILES: &[(&str, &str)] = &[
    // Plugins are listed even if the configuration disables them.
    ("config.toml", "[plugins.\"off@market\"]\nenabled = false\n"),
    (
        "plugins/cache/market/off/1.0.0/.codex-plugin/plugin.json",
        r#"{"name":"off"}"#,
    ),
    (
        "plugins/cache/market/demo/10.0.0/.codex-plugin/plugin.json",
        r#"{"name":"shown","version":"7","interface":{"displayName":"Demo"},"mcpServers":"./mcp.json"}"#,
    ),
    (
        "plugins/cache/market/demo/10.0.0/mcp.json",
        r#"{"mcpServers":{}}"#,
    ),
    (
        "plugins/cache/market/demo/10.0.0/.app.json",
        r#"{"apps":{}}"#,
    ),
    (
        "plugins/cache/market/demo/10.0.0/skills/alpha/SKILL.md",
        "---\nname: alpha\ndescription: a\n---\n",
    ),
    (
        "plugins/cache/market/demo/10.0.0/other/SKILL.md",
        "---\nname: beta\ndescription: b\n---\n",
    ),
    (
        "plugins/cache/market/demo/9.0.0/.codex-plugin/plugin.json",
        r#"{"name":"older"}"#,
    ),
    (
        "plugins/cache/market/claude/local/.claude-plugin/plugin.json",
        "{}",
    ),
    (
        "plugins/cache/market/claude/2.0.0/.claude-plugin/plugin.json",
        r#"{"name":"not this"}"#,
    ),
    (
        "plugins/cache/market/inline/2.0.0/.codex-plugin/plugin.json",
        r#"{"name":"inline","interface":{"displayName":" "},"mcpServers":{"q": {"command": "true"}}}"#,
    ),
    (
        "plugins/cache/market/broken/2.0.0/.codex-plugin/plugin.json",
        r#"{"name":"#,
    ),
    ("plugins/cache/market/empty/1.0.0/file", ""),
    (
        "skills/one/SKILL.md",
        "---\nname: one\ndescription: The first  skill\nmetadata:\n  short-description: First\n---\nText\n",
    ),
    (
        "skills/one/agents/openai.yaml",
        "interface:\n  short_description: \"another\"\ndependencies:\n  tools:\n    - type: \"mcp\"\n      \
         value: \"x\"\n    - type: mcp\n      value: y\n      description: d\n      transport: stdio\n      \
         command: c\n      url: https://u\n      oauth_callback_port: 12\n    - type: incomplete\n\
         policy:\n  allow_implicit_invocation: false\n  products: [codex, chatgpt]\n",
    ),
    (
        "skills/folded/SKILL.md",
        "---\nname: folded\ndescription: >\n  one\n  two\n\n  three\n---\n",
    ),
    (
        "skills/colon/SKILL.md",
        "---\nname: 5\ndescription: with: colon\n---\n",
    ),
    (
        "skills/unnamed/SKILL.md",
        "---\ndescription: \"q\\u0041\"\n---\n",
    ),
    (
        "skills/.hidden/SKILL.md",
        "---\nname: hidden\ndescription: h\n---\n",
    ),
    (
        "skills/1/2/3/4/5/SKILL.md",
        "---\nname: d5\ndescription: d\n---\n",
    ),
    (
        "skills/1/2/3/4/5/6/SKILL.md",
        "---\nname: d6\ndescription: d\n---\n",
    ),
    (
        "skills/1/2/3/4/5/6/7/SKILL.md",
        "---\nname: d7\ndescription: d\n---\n",
    ),
    (
        "skills/badyaml/SKILL.md",
        "---\nname: badyaml\ndescription: d\n---\n",
    ),
    ("skills/badyaml/agents/openai.yaml", "policy: [\n"),
    (
        "skills/badpolicy/SKILL.md",
        "---\nname: badpolicy\ndescription: d\n---\n",
    ),
    (
        "skills/badpolicy/agents/openai.yaml",
        "policy:\n  products: [codex, nonsense]\n",
    ),
    ("skills/broken/SKILL.md", "---\nname: [unclosed\n---\n"),
    ("skills/none/SKILL.md", "no header\n"),
    ("skills/nodescription/SKILL.md", "---\nname: a\n---\n"),
];

pub(crate) fn write_files(home: &Path) {
    for (path, text) in FILES {
        let path = home.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
}

/// A server that reads the configuration in `home`.
pub(crate) async fn served(home: &Path, offers: bool) -> (TestedServer, WireClient) {
    let mut command = program();
    command
        .env("EXEC_SERVER_CLIENT_CONFIG_HOME", home)
        .env("EXEC_SERVER_CLIENT_CONFIG_DISCOVER_ALL", offers.to_string());
    let mut server = TestedServer::start(Transport::Websocket, command).await;
    let client = server.session().await;
    (server, client)
}

pub(crate) async fn catalog(client: &mut WireClient) -> Value {
    client.ok(METHOD, json!({"cwd": "file:///tmp"})).await
}

#[tokio::test]
async fn catalog_lists_installed_plugins_and_skills() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path().canonicalize().unwrap();
    write_files(&home);
    let (_server, mut client) = served(&home, true).await;
    let found = catalog(&mut client).await;
    let plugins = found["plugins"].as_array().unwrap();
    let shown: Vec<_> = plugins
        .iter()
        .map(|plugin| {
            let skills = plugin["skills"].as_array().unwrap().iter();
            let skills: Vec<_> = skills
                .map(|skill| skill["name"].as_str().unwrap())
                .collect();
            let text = |name: &str| plugin[name].as_str().unwrap();
            (text("id"), text("displayName"), text("version"), skills)
        })
        .collect();
    assert_eq!(
        shown,
        [
            ("claude@market", "local", "local", vec![]),
            (
                "demo@market",
                "Demo",
                "10.0.0",
                vec!["shown:beta", "shown:alpha"]
            ),
            ("inline@market", "inline", "2.0.0", vec![]),
            ("off@market", "off", "1.0.0", vec![]),
        ]
    );
    let root = format!("file://{}", home.display());
    assert_eq!(
        plugins[2]["files"]["mcpConfig"],
        json!({
            "path": format!("{root}/plugins/cache/market/inline/2.0.0/.codex-plugin/plugin.json"),
            "contents": "{\"q\":{\"command\":\"true\"}}",
        })
    );
    let skills = found["skills"].as_array().unwrap();
    let one = skills.iter().find(|skill| skill["name"] == "one").unwrap();
    let tool = |value: &str, [description, transport, command, url]: [Value; 4]| {
        json!({"type": "mcp", "value": value, "description": description, "transport": transport,
            "command": command, "url": url, "oauthCallbackPort": null})
    };
    assert_eq!(
        *one,
        json!({
            "name": "one", "description": "The first skill", "shortDescription": "First",
            "path": format!("{root}/skills/one/SKILL.md"),
            "discoveryRoot": {"id": "codex-home-skills", "path": format!("{root}/skills")},
            "dependencies": {"tools": [
                tool("x", [Value::Null, Value::Null, Value::Null, Value::Null]),
                tool("y", [json!("d"), json!("stdio"), json!("c"), json!("https://u")]),
            ]},
            "policy": {"allowImplicitInvocation": false, "products": ["codex", "chatgpt"]},
        })
    );
    let names: Vec<_> = skills
        .iter()
        .map(|skill| skill["name"].as_str().unwrap())
        .collect();
    assert_eq!(
        names,
        [
            "hidden",
            "d6",
            "d5",
            "badpolicy",
            "badyaml",
            "5",
            "folded",
            "one",
            "unnamed"
        ]
    );
    // One for each plugin that is left out, one for all skills.
    assert_eq!(found["warnings"], json!([WARNING, WARNING, WARNING]));
}

#[tokio::test]
async fn catalog_of_a_missing_directory_is_empty() {
    let home = tempfile::tempdir().unwrap();
    let (_server, mut client) = served(&home.path().join("none"), true).await;
    let empty = json!({"plugins": [], "skills": [], "warnings": []});
    assert_eq!(catalog(&mut client).await, empty);
    let refused = client.refused(METHOD, json!({"cwd": "tmp"})).await;
    assert_eq!(refused.code, -32602, "{refused}");
}

#[tokio::test]
async fn catalog_is_offered_only_if_a_setting_asks_for_it() {
    let home = tempfile::tempdir().unwrap();
    for offers in [false, true] {
        let (_server, client) = served(home.path(), offers).await;
        let capabilities = &client.session["environmentInfo"]["capabilities"];
        assert_eq!(capabilities["capabilityDiscoveryV2"], offers);
    }
}

#[tokio::test]
async fn catalog_obeys_the_policy_of_the_request() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path().canonicalize().unwrap();
    write_files(&home);
    let (_server, mut client) = served(&home, true).await;
    let uri = |path: &Path| format!("file://{}", path.display());
    let entries = json!([
        {"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"},
        {"path": {"type": "path", "path": uri(&home.join("skills"))}, "access": "none"},
    ]);
    let sandbox = json!({
        "permissions": {"type": "managed", "network": "restricted",
            "file_system": {"type": "restricted", "entries": entries}},
        "cwd": uri(&home), "workspaceRoots": [uri(&home)], "windowsSandboxLevel": "disabled",
        "useLegacyLandlock": false,
    });
    let params = json!({"cwd": "file:///tmp", "sandbox": sandbox});
    let found = client.ok(METHOD, params).await;
    assert_eq!(found["skills"], json!([]));
    assert_eq!(found["plugins"].as_array().unwrap().len(), 4);
}
