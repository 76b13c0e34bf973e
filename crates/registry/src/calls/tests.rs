use exec_server_relay::keys::MLKEM768_BYTES;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::*;
use exec_server_transport::http::{HeadKind, read_head};

/// Test registry that sends prepared responses and records the requests.
struct Scripted {
    url: String,
    requests: tokio::task::JoinHandle<Vec<(exec_server_transport::http::HttpHead, Value)>>,
}

impl Scripted {
    /// Starts the registry; each inner list has the responses of one connection.
    async fn new(connections: Vec<Vec<(u16, String)>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let requests = tokio::spawn(async move {
            let mut requests = Vec::new();
            for answers in connections {
                let (mut stream, _) = listener.accept().await.unwrap();
                for (status, body) in answers {
                    let mut head = read_head(&mut stream, HeadKind::Request).await.unwrap();
                    let length = head.header("content-length").unwrap().parse().unwrap();
                    let mut request = std::mem::take(&mut head.rest);
                    while request.len() < length {
                        stream.read_buf(&mut request).await.unwrap();
                    }
                    requests.push((head, serde_json::from_slice(&request).unwrap()));
                    let answer = format!(
                        "HTTP/1.1 {status} X\r\nLocation: http://127.0.0.1:9/\r\n\
                         Content-Length: {}\r\n\r\n{body}",
                        body.len()
                    );
                    stream.write_all(answer.as_bytes()).await.unwrap();
                }
            }
            requests
        });
        Self { url, requests }
    }

    fn registry(&self) -> Registry {
        let options = RegistryOptions::new(RegistryAuth::bearer("tok"));
        Registry::new(&self.url, "env-1", options).unwrap()
    }
}

fn key() -> PublicKey {
    PublicKey::new([1; 32], &[2; MLKEM768_BYTES]).unwrap()
}

fn registered() -> Value {
    json!({"environment_id": "env-1", "url": "ws://h/x", "security_profile": SECURITY_PROFILE,
           "executor_registration_id": "r", "more": 1})
}

#[tokio::test]
async fn calls_follow_the_contract_and_share_a_connection() {
    let valid = |valid: bool| (200, json!({"valid": valid}).to_string());
    let answers = vec![(201, registered().to_string()), valid(true), valid(false)];
    let scripted = Scripted::new(vec![answers]).await;
    let registry = scripted.registry();
    let key = key();
    let answer = registry.register(&key, None).await.unwrap();
    assert_eq!(answer.executor_registration_id, "r");
    let authorization = Authorization::new("secret-auth").unwrap();
    let validate = |stream| registry.validate(stream, "r", &key, &authorization);
    assert!(validate("s-1").await.unwrap());
    assert!(!validate("ä").await.unwrap());
    let requests = scripted.requests.await.unwrap();
    let (head, body) = &requests[0];
    assert_eq!(head.method, "POST");
    assert_eq!(head.target, "/cloud/environment/env-1/register");
    assert_eq!(head.header("authorization"), Some("Bearer tok"));
    assert_eq!(head.header("content-type"), Some("application/json"));
    assert_eq!(head.header("accept"), Some("*/*"));
    assert_eq!(head.header("user-agent"), None);
    assert!(head.header("host").unwrap().starts_with("127.0.0.1:"));
    assert_eq!(body["security_profile"], SECURITY_PROFILE);
    assert!(body.get("name").is_none());
    let (head, body) = &requests[1];
    assert_eq!(head.target, "/cloud/environment/env-1/validate");
    assert_eq!(head.header(STREAM_ID_HEADER), Some("s-1"));
    assert_eq!(body["executor_registration_id"], "r");
    assert_eq!(body["harness_key_authorization"], "secret-auth");
    assert_eq!(requests[2].0.header(STREAM_ID_HEADER), None);
}

#[tokio::test]
async fn each_error_status_says_whether_it_is_retryable() {
    let offline = json!({"error": {"code": "environment_offline", "message": "no\u{1b}[31m"}});
    let other = json!({"error": {"code": "conflict", "message": null}});
    let cases = vec![
        (500, String::new(), true),
        (503, "busy".to_owned(), true),
        (408, String::new(), true),
        (429, String::new(), true),
        (409, offline.to_string(), true),
        (409, other.to_string(), false),
        (401, String::new(), false),
        (403, String::new(), false),
        (404, String::new(), false),
        (302, String::new(), false),
        (200, "{}".to_owned(), false),
        (200, json!({"environment_id": "other"}).to_string(), false),
    ];
    let answers = cases
        .iter()
        .map(|(status, body, _)| (*status, body.clone()));
    let scripted = Scripted::new(vec![answers.collect()]).await;
    let registry = scripted.registry();
    for (status, body, retryable) in &cases {
        let error = registry.connect(&key()).await.unwrap_err();
        assert_eq!(error.is_retryable(), *retryable, "{status} {body}: {error}");
        assert_eq!(
            matches!(error, RegistryError::Auth { .. }),
            matches!(status, 401 | 403)
        );
        assert!(!error.to_string().contains('\u{1b}'), "{error}");
    }
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", closed.local_addr().unwrap());
    drop(closed);
    let options = RegistryOptions::new(RegistryAuth::Open);
    let registry = Registry::new(&url, "env-1", options).unwrap();
    let error = registry.connect(&key()).await.unwrap_err();
    assert!(error.is_outage(), "{error}");
}

#[tokio::test]
async fn responses_about_another_environment_are_refused() {
    let with = |name: &str, value: &str| {
        let mut answer = registered();
        answer[name] = json!(value);
        (200, answer.to_string())
    };
    let answers = vec![
        with("environment_id", "env-2"),
        with("security_profile", "none"),
        with("url", " "),
        with("executor_registration_id", ""),
        (200, "x".repeat(MAX_ANSWER_BYTES + 1)),
    ];
    let scripted = Scripted::new(vec![answers]).await;
    let registry = scripted.registry();
    for part in ["env-2", "none", "`url`", "`executor_registration_id`"] {
        let error = registry.register(&key(), None).await.unwrap_err();
        assert!(matches!(error, RegistryError::Protocol { .. }), "{error}");
        assert!(error.to_string().contains(part), "{error}");
    }
    assert!(registry.register(&key(), None).await.is_err());
}

#[tokio::test]
async fn call_on_a_closed_idle_connection_is_retried() {
    let answer = || (200, registered().to_string());
    let scripted = Scripted::new(vec![vec![answer()], vec![answer()]]).await;
    let registry = scripted.registry();
    registry.register(&key(), None).await.unwrap();
    registry.register(&key(), Some("here")).await.unwrap();
    let requests = scripted.requests.await.unwrap();
    assert_eq!(requests[1].1["name"], "here");
}

#[tokio::test]
async fn silent_registry_times_out() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let mut options = RegistryOptions::new(RegistryAuth::Open);
    options.timeout = Duration::from_millis(50);
    let registry = Registry::new(&url, "env-1", options).unwrap();
    let error = registry.connect(&key()).await.unwrap_err();
    assert!(matches!(error, RegistryError::Timeout { .. }), "{error}");
    assert!(error.is_outage());
}

#[test]
fn credentials_are_not_sent_without_tls() {
    let new = |url: &str, auth, danger| {
        let mut options = RegistryOptions::new(auth);
        options.danger_plain_http = danger;
        Registry::new(url, "e", options).map(|registry| registry.configured.base.to_string())
    };
    let token = || RegistryAuth::bearer("t");
    for (url, fine) in [
        ("http://127.0.0.1:1", true),
        ("http://localhost", true),
        ("http://[::1]:1", true),
        ("https://meet.example", true),
        ("http://meet.example", false),
        ("http://10.0.0.1", false),
    ] {
        assert_eq!(new(url, token(), false).is_ok(), fine, "{url}");
        assert!(new(url, token(), true).is_ok(), "{url}");
        assert!(new(url, RegistryAuth::Open, false).is_ok(), "{url}");
    }
    for bad in ["", "ws://h", "h", "http://h?x", "http://u:p@h", "file:///x"] {
        let error = new(bad, token(), true).unwrap_err().to_string();
        assert!(!error.contains("u:p"), "{error}");
    }
    assert_eq!(
        new(" https://h/prefix/ ", token(), false).unwrap(),
        "https://h/prefix/cloud/environment/e/"
    );
    let options = || RegistryOptions::new(RegistryAuth::Open);
    for id in ["", " ", ".", ".."] {
        assert!(Registry::new("https://h", id, options()).is_err(), "{id}");
    }
    let odd = Registry::new("https://h", "a/b c?", options()).unwrap();
    assert_eq!(
        odd.configured.base.path(),
        "/cloud/environment/a%2Fb%20c%3F/"
    );
}

#[test]
fn environment_urls_parse_and_format_unchanged() {
    for (text, registry, environment) in [
        ("registry://meet.example/env", "https://meet.example", "env"),
        (
            "registry://meet.example:8443/a/env",
            "https://meet.example:8443/a",
            "env",
        ),
        (
            "registry://127.0.0.1:4700/env",
            "http://127.0.0.1:4700",
            "env",
        ),
        ("registry://[::1]:4700/env", "http://[::1]:4700", "env"),
        ("registry+https://localhost/env", "https://localhost", "env"),
        ("registry+http://10.0.0.1:80/env", "http://10.0.0.1", "env"),
    ] {
        let url: RegistryUrl = text.parse().unwrap();
        assert_eq!(url.registry_url(), registry, "{text}");
        assert_eq!(url.environment_id(), environment, "{text}");
        let again: RegistryUrl = url.to_string().parse().unwrap();
        assert_eq!(again, url, "{text}");
    }
    for bad in [
        "registry://h",
        "registry:///e",
        "https://h/e",
        "registry://h/",
        "registry://u@h/e",
    ] {
        assert!(bad.parse::<RegistryUrl>().is_err(), "{bad}");
    }
}

#[tokio::test]
async fn dial_errors_hide_the_url_query_and_unix_urls_are_refused() {
    let options = RegistryOptions::new(RegistryAuth::Open);
    let registry = Registry::new("http://127.0.0.1:1", "e", options).unwrap();
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = closed.local_addr().unwrap();
    drop(closed);
    for url in [
        format!("ws://{address}/x?sig=sekrit"),
        "unix:///run/x?sig=sekrit".to_owned(),
        "http://127.0.0.1/?sig=sekrit".to_owned(),
        "sekrit".to_owned(),
    ] {
        let dialled = registry.dial(&url, Duration::from_secs(5)).await;
        let error = dialled.unwrap_err();
        let error = format!("{error} {error:?}");
        assert!(!error.contains("sekrit"), "{error}");
    }
}
