//! The settings file, and errors about it.

use exec_server_testkit::server::ServerProcess;
use exec_server_testkit::wire::WireClient;
use exec_server_transport::{ConnectOptions, connect};
use serde_json::{Value, json};

use crate::{AuthFiles, output, program, refuses, text_of};

#[tokio::test]
async fn settings_file_applies_where_no_flag_is_given() {
    let files = AuthFiles::new();
    let token = files.write("token", "tok123");
    let socket = text_of(&files.path("socket"));
    let config = files.write(
        "exec-server.toml",
        &format!(
            "listen = [\"ws://127.0.0.1:0\", \"unix://{socket}\"]\n\
             [auth]\nmode = \"capability-token\"\ntoken_files = [\"{token}\"]\n\
             [limits]\nprocesses_per_session = 1\nsessions = 7\n"
        ),
    );
    let mut command = program();
    command
        .args(["--config", &config, "--set", "limits.sessions=1"])
        .env("EXEC_SERVER_LIMITS_SESSIONS", "5");
    let shown = program()
        .args(["config", "show", "--config", &config, "--json"])
        .env("EXEC_SERVER_LIMITS_SESSIONS", "5")
        .output()
        .await
        .unwrap();
    let shown: Vec<Value> = serde_json::from_slice(&shown.stdout).unwrap();
    let entry = |key: &str| {
        let found = shown.iter().find(|entry| entry["key"] == key).unwrap();
        (
            found["value"].clone(),
            found["origin"].as_str().unwrap().to_owned(),
        )
    };
    assert_eq!(
        entry("limits.sessions"),
        (json!(5), "EXEC_SERVER_LIMITS_SESSIONS".to_owned())
    );
    assert_eq!(
        entry("limits.processes_per_session"),
        (json!(1), config.clone())
    );
    assert_eq!(entry("times.drain"), (json!("0s"), "default".to_owned()));
    assert_eq!(entry("tls.cert"), (Value::Null, "default".to_owned()));

    // Both listeners require the token; the limit from the flag applies.
    let server = ServerProcess::listening(command, "ws://127.0.0.1:0").await;
    let mut options = ConnectOptions::default();
    options.bearer_token = Some("tok123".into());
    let link = connect(server.url(), &options).await.unwrap();
    let mut client = WireClient::new(link);
    client.initialize(json!({"clientName": "test"})).await;
    let link = connect(server.url(), &options).await.unwrap();
    let mut second = WireClient::new(link);
    let failure = second
        .call("initialize", json!({"clientName": "test"}))
        .await
        .unwrap_err();
    assert_eq!(failure.message, "limit of 1 sessions reached");
}

#[tokio::test]
async fn server_accepts_connections_on_several_listeners() {
    let files = AuthFiles::new();
    let socket = format!("unix://{}", files.path("socket").display());
    let mut command = program();
    command.args(["--listen", &socket]);
    // The first printed line is the first listener.
    let server = ServerProcess::listening(command, "ws://127.0.0.1:0").await;
    assert_eq!(server.url(), socket);
    let link = connect(&socket, &ConnectOptions::default()).await.unwrap();
    WireClient::new(link)
        .initialize(json!({"clientName": "test"}))
        .await;
}

#[tokio::test]
async fn settings_errors_name_the_key_or_file() {
    let files = AuthFiles::new();
    for (text, expected) in [
        ("[limits]\nsesions = 1\n", "unknown key `limits.sesions`"),
        (
            "[limits]\nsessions = \"many\"\n",
            "`limits.sessions` must be",
        ),
        (
            "listen = [\"tcp://x\"]\n",
            "unsupported --listen URL `tcp://x`",
        ),
        ("listen = []\n", "`listen` is an empty list"),
        (
            "[tls]\nself_signed = true\n",
            "TLS options need a `wss://IP:PORT` listener",
        ),
        ("nonsense", "cannot understand"),
        ("[log]\nfilter = \"a=b=c\"\n", "`log.filter` is `a=b=c`"),
    ] {
        let config = files.write("exec-server.toml", text);
        refuses(&["--config", &config], expected).await;
    }
    refuses(
        &["--config", "/no/such/file.toml"],
        "cannot read the configuration /no/such/file.toml",
    )
    .await;
    refuses(&["--set", "nonsense=1"], "unknown key `nonsense`").await;
    refuses(
        &["--listen", "stdio", "--listen", "ws://127.0.0.1:0"],
        "cannot be combined",
    )
    .await;
    refuses(&["--listen", "wss://127.0.0.1:0"], "needs `--tls-cert`").await;
    let shown = output(&["config", "show", "--set", "limits.sessions=0"]).await;
    assert_eq!(shown.status.code(), Some(1));
}

#[tokio::test]
async fn log_format_json_writes_json_lines() {
    let mut command = program();
    command.args(["--log-format", "json", "--log", "debug"]);
    let server = ServerProcess::start(command).await;
    let link = connect(server.url(), &ConnectOptions::default())
        .await
        .unwrap();
    let mut client = WireClient::new(link);
    client.initialize(json!({"clientName": "test"})).await;
    client.call("process/list", json!({})).await.unwrap();
    let stderr = server.stderr();
    let lines: Vec<Value> = stderr
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}")))
        .collect();
    let request = lines
        .iter()
        .find(|line| line["fields"]["method"] == "process/list")
        .unwrap_or_else(|| panic!("{stderr}"));
    assert!(request["fields"]["request"].is_string(), "{request}");
}

#[tokio::test]
async fn packaged_settings_listen_on_a_private_socket() {
    let config = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../dist/debian/exec-server.toml"
    );
    let shown = output(&["config", "show", "--config", config, "--json"]).await;
    let shown: Vec<Value> = serde_json::from_slice(&shown.stdout).unwrap();
    let listen = shown.iter().find(|entry| entry["key"] == "listen").unwrap();
    assert_eq!(
        listen["value"],
        json!(["unix:///run/exec-server/serve.sock"])
    );
    // The unit makes the directory, which is closed to others.
    let unit = include_str!("../../../../dist/exec-server.service");
    for line in ["RuntimeDirectory=exec-server", "RuntimeDirectoryMode=0700"] {
        assert!(unit.lines().any(|found| found == line), "{line}");
    }
}
