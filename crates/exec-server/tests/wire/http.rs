//! `http/*`: requests that the server sends on behalf of a client.

use std::sync::Arc;

use exec_server_testkit::proc::{TIMEOUT, eventually};
use exec_server_testkit::site::{HttpSite, answer, say};
use exec_server_testkit::wire::{ErrorReply, TestedServer, Transport, WireClient, bytes};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::{Notify, Semaphore};
use tokio::time::timeout;

use crate::{over_all, program, served};

over_all! {
    http_request_returns_status_headers_and_body,
    http_body_is_streamed_after_the_response,
}

/// `hello ` twenty times.
const GZIP: &str = "H4sIAAAAAAACA8tIzcnJV8igOwkAL/r4SHgAAAA=";
const ZLIB: &str = "eNrLSM3JyVfIoDsJAHe6LBE=";
/// A quarter of a mebibyte of zeros.
const BOMB: &str = "H4sIAAAAAAACA+3BMQEAAADCoPVP7W0HoAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA3gAi6g7iAAAEAA==";

fn get(url: &str) -> Value {
    json!({"method": "GET", "url": url, "requestId": "r"})
}

fn with(mut params: Value, field: &str, value: impl Into<Value>) -> Value {
    params[field] = value.into();
    params
}

/// A server with these settings, over a websocket, and its client.
async fn set(settings: &[&str]) -> (TestedServer, WireClient) {
    let mut command = program();
    for setting in settings {
        command.args(["--set", setting]);
    }
    let mut subject = TestedServer::start(Transport::Websocket, command).await;
    let client = subject.session().await;
    (subject, client)
}

/// Collects a streamed body; returns its data and the error at its end.
async fn body(client: &mut WireClient, request_id: &str) -> (Vec<u8>, Option<String>) {
    let mut all = Vec::new();
    for seq in 1.. {
        let delta = client.notice("http/request/bodyDelta").await;
        assert_eq!(
            (&delta["requestId"], &delta["seq"]),
            (&json!(request_id), &json!(seq))
        );
        let piece = bytes(&delta["deltaBase64"]);
        assert!(piece.len() <= 1 << 20);
        if delta["done"] == true {
            assert!(piece.is_empty());
            return (all, delta["error"].as_str().map(str::to_owned));
        }
        assert_eq!(delta["error"], Value::Null);
        all.extend(piece);
    }
    unreachable!()
}

async fn http_request_returns_status_headers_and_body(on: Transport) {
    let (_server, mut client) = served(on).await;
    let site = HttpSite::saying(answer(
        "418 Odd",
        "X-One: 1\r\nset-cookie: a\r\nX-Two: 2\r\nset-cookie: b\r\nx-bytes: \u{fffd}\r\n",
        [0, 255, 10],
    ))
    .await;
    let params = json!({
        "method": "pAtCh", "url": site.url("/a?b=c#d"), "requestId": "r", "bodyBase64": "aGk=",
        "headers": [
            {"name": "X-B", "value": "1"}, {"name": "x-a", "value": ""},
            {"name": "X-B", "value": "2", "valueEnvVar": null},
        ],
    });
    let result = client.ok("http/request", params).await;
    assert_eq!(result["status"], 418);
    assert_eq!(bytes(&result["bodyBase64"]), [0, 255, 10]);
    let headers: Vec<(&str, &str)> = result["headers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|header| {
            let text = |key: &str| header[key].as_str().unwrap();
            (text("name"), text("value"))
        })
        .collect();
    let expected = [
        ("x-one", "1"),
        ("set-cookie", "a"),
        ("set-cookie", "b"),
        ("x-two", "2"),
        ("content-length", "3"),
        ("connection", "close"),
    ];
    assert_eq!(headers, expected);
    let [request] = &site.requests()[..] else {
        panic!()
    };
    assert_eq!(request.line, "pAtCh /a?b=c HTTP/1.1");
    assert_eq!(request.body, b"hi");
    let sent: Vec<(&str, &str)> = request.headers.iter().map(|(n, v)| (&**n, &**v)).collect();
    let host = site.address().to_string();
    let expected = [
        ("x-b", "1"),
        ("x-b", "2"),
        ("x-a", ""),
        ("accept", "*/*"),
        ("host", &host),
        ("content-length", "2"),
    ];
    assert_eq!(sent, expected);
}

async fn http_body_is_streamed_after_the_response(on: Transport) {
    let (_server, mut client) = served(on).await;
    let go = Arc::new(Notify::new());
    let wait = Arc::clone(&go);
    let site = HttpSite::start(move |_, mut stream| {
        let wait = Arc::clone(&wait);
        async move {
            say(
                &mut stream,
                b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
            )
            .await;
            wait.notified().await;
            for byte in [b'a', b'b'] {
                let piece = vec![byte; 1_500_000];
                say(&mut stream, format!("{:x}\r\n", piece.len()).as_bytes()).await;
                say(&mut stream, &piece).await;
                say(&mut stream, b"\r\n").await;
            }
            say(&mut stream, b"0\r\n\r\n").await;
        }
    })
    .await;
    let params = with(get(&site.url("/")), "streamResponse", true);
    // The response arrives before any of the body.
    let result = client.ok("http/request", params.clone()).await;
    assert_eq!(
        (&result["status"], &result["bodyBase64"]),
        (&json!(200), &json!(""))
    );
    let refused = client.refused("http/request", params.clone()).await;
    assert_eq!(refused.code, -32602);
    assert_eq!(
        refused.message,
        "http/request streamResponse requestId `r` is already active"
    );
    go.notify_one();
    let (all, error) = body(&mut client, "r").await;
    assert_eq!(error, None);
    assert!(all.len() == 3_000_000 && all[1_499_999] == b'a' && all[1_500_000] == b'b');
    // The id can be used again.
    client.ok("http/request", params).await;
    go.notify_one();
    assert_eq!(body(&mut client, "r").await.0.len(), 3_000_000);
}

#[tokio::test]
async fn http_header_values_come_from_the_environment_except_secrets() {
    let mut command = program();
    command
        .env("MY_TOKEN", "t0p")
        .env("OPENAI_API_KEY", "never")
        .env("NODE_REPL_AUTH_TOKEN", "allowed here");
    let mut subject = TestedServer::start(Transport::Websocket, command).await;
    let mut client = subject.session().await;
    let info = &client.session["environmentInfo"];
    assert_eq!(info["capabilities"]["httpHeaderEnvVars"], true);
    let elsewhere = HttpSite::saying(answer("200 OK", "", "")).await;
    let target = elsewhere.url("/there");
    let site = HttpSite::saying(answer("302 Found", &format!("location: {target}\r\n"), "")).await;
    let header = |name: &str, variable: &str| {
        let header = json!({"name": name, "value": "x ", "valueEnvVar": variable});
        with(
            get(&site.url("/")),
            "headers",
            json!([header, {"name": "y", "value": "1"}]),
        )
    };
    client
        .ok("http/request", header("Authorization", "MY_TOKEN"))
        .await;
    client
        .ok("http/request", header("X-Own", "NODE_REPL_AUTH_TOKEN"))
        .await;
    let requests = site.requests();
    assert_eq!(requests[0].header("authorization"), Some("x t0p"));
    assert_eq!(requests[1].header("x-own"), Some("x allowed here"));
    // A value from the server's environment is not sent to another host after a redirect.
    for request in elsewhere.requests() {
        let kept = ["authorization", "x-own", "y"].map(|name| request.header(name));
        assert_eq!(kept, [None, None, Some("1")]);
    }
    assert_eq!(elsewhere.requests().len(), 2);
    for (variable, reason) in [
        (
            "openai_api_key",
            "cannot use executor environment variable openai_api_key",
        ),
        (
            "AWS_SECRET_ACCESS_KEY",
            "cannot use executor environment variable AWS",
        ),
        ("UNHEARD_OF", "variable UNHEARD_OF, which is not set"),
    ] {
        let refused = client.refused("http/request", header("h", variable)).await;
        assert_eq!(refused.code, -32602);
        assert!(refused.message.contains(reason), "{}", refused.message);
    }
}

#[tokio::test]
async fn http_redirects_change_the_method_as_browsers_do() {
    let (_server, mut client) = served(Transport::Websocket).await;
    let site = HttpSite::start(|request, mut stream| async move {
        let (status, location) = match request.path() {
            "/see" => ("303 See Other", "/end"),
            "/moved" => ("301 Moved", "/end"),
            "/same" => ("307 Same", "end"),
            "/loop" => ("302 Found", "/loop"),
            "/ftp" => ("302 Found", "ftp://127.0.0.1/"),
            _ => ("200 OK", ""),
        };
        let headers = match location {
            "" => String::new(),
            location => format!("location: {location}\r\n"),
        };
        say(&mut stream, &answer(status, &headers, "body")).await;
    })
    .await;
    let post = |path: &str| {
        let params = json!({"method": "POST", "url": site.url(path), "requestId": "r"});
        with(params, "bodyBase64", "aGk=")
    };
    for (path, line, body) in [
        ("/see", "GET /end HTTP/1.1", &b""[..]),
        ("/moved", "GET /end HTTP/1.1", b""),
        ("/same", "POST /end HTTP/1.1", b"hi"),
    ] {
        let result = client.ok("http/request", post(path)).await;
        assert_eq!(result["status"], 200, "{path}");
        let last = site.requests().pop().unwrap();
        assert_eq!((&*last.line, &*last.body), (line, body), "{path}");
        assert_eq!(last.header("referer"), Some(&*site.url(path)));
    }
    let stop = with(post("/see"), "redirectPolicy", "stop");
    let result = client.ok("http/request", stop).await;
    assert_eq!(result["status"], 303);
    assert_eq!(bytes(&result["bodyBase64"]), b"body");
    let before = site.requests().len();
    let failed = client
        .refused("http/request", get(&site.url("/loop")))
        .await;
    assert_eq!(failed.code, -32603);
    assert!(
        failed.message.contains("more than 10 redirects"),
        "{failed}"
    );
    assert_eq!(site.requests().len(), before + 11);
    let failed = client.refused("http/request", get(&site.url("/ftp"))).await;
    assert!(failed.message.contains("ftp"), "{failed}");
}

#[tokio::test]
async fn http_request_rejects_invalid_params() {
    let (_server, mut client) = served(Transport::Websocket).await;
    for (field, value, reason) in [
        ("method", "G T", "http/request method is invalid"),
        ("url", "nowhere", "http/request url is invalid: "),
        (
            "url",
            "file:///etc/passwd",
            "http/request only supports http and https URLs, got file",
        ),
        ("bodyBase64", "***", "invalid base64"),
        ("redirectPolicy", "maybe", "maybe"),
    ] {
        let params = with(get("http://127.0.0.1:9/"), field, value);
        let refused = client.refused("http/request", params).await;
        assert_eq!(refused.code, -32602, "{field} {value}");
        assert!(refused.message.contains(reason), "{}", refused.message);
    }
    let headers = json!([{"name": "a", "value": "1\r\nb: 2"}]);
    let params = with(get("http://127.0.0.1:9/"), "headers", headers);
    assert_eq!(client.refused("http/request", params).await.code, -32602);
    let unknown = client
        .ok("http/cancel", json!({"requestId": "nobody"}))
        .await;
    assert_eq!(unknown, json!({"cancelled": false}));
}

/// Requests to sites that misbehave; each failure is one response, and the connection stays open.
#[tokio::test]
async fn http_request_to_a_broken_site_fails_alone() {
    let (_server, mut client) = served(Transport::Websocket).await;
    let gone = {
        let site = HttpSite::saying("").await;
        site.address()
    };
    let refused = client
        .refused("http/request", get(&format!("http://{gone}/")))
        .await;
    assert_eq!(refused.code, -32603);
    assert!(
        refused.message.starts_with("http/request failed: "),
        "{refused}"
    );
    for nonsense in [
        &b""[..],
        b"hello\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n12345",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
    ] {
        let site = HttpSite::saying(nonsense).await;
        let failed = client.refused("http/request", get(&site.url("/"))).await;
        assert_eq!(failed.code, -32603, "{}", String::from_utf8_lossy(nonsense));
        assert!(
            failed.message.starts_with("http/request failed: "),
            "{failed}"
        );
    }
    for broken in [
        &b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort"[..],
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhel",
    ] {
        let site = HttpSite::saying(broken).await;
        let failed = client.refused("http/request", get(&site.url("/"))).await;
        assert_eq!(failed.code, -32603);
        let start = "failed to read http/request response body: ";
        assert!(failed.message.starts_with(start), "{failed}");
        // For a streamed body the last delta carries the error.
        let params = with(get(&site.url("/")), "streamResponse", true);
        client.ok("http/request", params).await;
        let (_, error) = body(&mut client, "r").await;
        assert!(error.unwrap().starts_with(start));
    }
    // Headers without end.
    let site = HttpSite::start(|_, mut stream| async move {
        say(&mut stream, b"HTTP/1.1 200 OK\r\n").await;
        while stream
            .write_all(b"x: yyyyyyyyyyyyyyyyyyyyyyyyy\r\n")
            .await
            .is_ok()
        {}
    })
    .await;
    let failed = client.refused("http/request", get(&site.url("/"))).await;
    assert_eq!(failed.code, -32603);
}

#[tokio::test]
async fn http_request_to_a_hanging_site_times_out_and_delays_nothing() {
    let (_server, mut client) = served(Transport::Websocket).await;
    let site = HttpSite::start(|request, mut stream| async move {
        if request.path() == "/body" {
            say(
                &mut stream,
                b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\npart",
            )
            .await;
        }
        std::future::pending::<()>().await;
    })
    .await;
    let hung = client.send("http/request", get(&site.url("/"))).await;
    let id = with(get(&site.url("/body")), "requestId", "b");
    let hung_body = client.send("http/request", id).await;
    // Hanging HTTP requests delay neither the process nor the file request.
    client.ok("environment/status", Value::Null).await;
    let path = json!({"path": "file:///proc/version"});
    client.ok("fs/readFile", path).await;
    for path in ["/", "/body"] {
        let params = with(get(&site.url(path)), "timeoutMs", 300);
        let failed = client.refused("http/request", params).await;
        assert_eq!(failed.code, -32603);
        assert!(failed.message.contains("300ms"), "{failed}");
    }
    let params = with(
        with(get(&site.url("/body")), "timeoutMs", 300),
        "streamResponse",
        true,
    );
    client
        .ok("http/request", with(params, "requestId", "s"))
        .await;
    let (part, error) = body(&mut client, "s").await;
    assert_eq!(part, b"part");
    assert!(error.unwrap().contains("300ms"));
    assert!(!client.has_answer(hung) && !client.has_answer(hung_body));
    for (id, sent) in [("r", hung), ("b", hung_body)] {
        let cancelled = client.ok("http/cancel", json!({"requestId": id})).await;
        assert_eq!(cancelled, json!({"cancelled": true}));
        let ErrorReply { code, message } = client.answer(sent).await.unwrap_err();
        assert_eq!((code, &*message), (-32600, "http/request was cancelled"));
    }
}

/// A site that sends without end, and adds a permit when a reader disconnects.
async fn endless() -> (HttpSite, Arc<Semaphore>) {
    let left = Arc::new(Semaphore::new(0));
    let finished = Arc::clone(&left);
    let site = HttpSite::start(move |_, mut stream| {
        let finished = Arc::clone(&finished);
        async move {
            say(&mut stream, b"HTTP/1.1 200 OK\r\n\r\n").await;
            while stream.write_all(&[b'x'; 65536]).await.is_ok() {}
            finished.add_permits(1);
        }
    })
    .await;
    (site, left)
}

/// Waits until one more reader has disconnected.
async fn one_left(left: &Semaphore) {
    let one = timeout(TIMEOUT, left.acquire()).await.unwrap();
    one.unwrap().forget();
}

#[tokio::test]
async fn http_cancel_ends_an_endless_body() {
    let (_server, mut client) = served(Transport::Websocket).await;
    let (site, left) = endless().await;
    let params = with(get(&site.url("/")), "streamResponse", true);
    client.ok("http/request", params).await;
    client.notice("http/request/bodyDelta").await;
    let cancelled = client.ok("http/cancel", json!({"requestId": "r"})).await;
    assert_eq!(cancelled, json!({"cancelled": true}));
    let end = loop {
        let delta = client.notice("http/request/bodyDelta").await;
        if delta["done"] == true {
            break delta;
        }
    };
    assert_eq!(end["error"], "http/request was cancelled");
    one_left(&left).await;
}

#[tokio::test]
async fn http_requests_end_with_their_connection_or_session() {
    let mut subject = TestedServer::start(Transport::Websocket, program()).await;
    let (site, left) = endless().await;
    let params = with(get(&site.url("/")), "streamResponse", true);
    // The client disconnects while the body is streamed.
    let mut client = subject.session().await;
    client.ok("http/request", params.clone()).await;
    client.notice("http/request/bodyDelta").await;
    drop(client);
    one_left(&left).await;
    // The client disconnects while the server cannot send: it reads nothing, all buffers are full.
    let mut client = subject.session().await;
    client.send("http/request", params.clone()).await;
    client
        .send("http/request", with(params.clone(), "requestId", "s"))
        .await;
    eventually("both requests", || match site.requests().len() {
        3 => Ok(()),
        other => Err(other.to_string()),
    })
    .await;
    drop(client);
    for _ in 0..2 {
        one_left(&left).await;
    }
    let mut client = subject.session().await;
    client.ok("http/request", params).await;
    client.ok("session/end", Value::Null).await;
    one_left(&left).await;
}

#[tokio::test]
async fn http_bodies_are_limited_in_size() {
    let settings = [
        "http.max_response_bytes=64KiB",
        "http.max_stream_bytes=1MiB",
    ];
    let (_server, mut client) = set(&settings).await;
    let (endless, left) = endless().await;
    let known = HttpSite::saying(answer("200 OK", "", vec![0; 65537])).await;
    let fits = HttpSite::saying(answer("200 OK", "", vec![7; 65536])).await;
    for site in [&endless, &known] {
        let failed = client.refused("http/request", get(&site.url("/"))).await;
        assert_eq!(failed.code, -32603);
        assert!(failed.message.contains("limit of 65536 bytes"), "{failed}");
    }
    one_left(&left).await;
    let result = client.ok("http/request", get(&fits.url("/"))).await;
    assert_eq!(bytes(&result["bodyBase64"]), vec![7; 65536]);
    let params = with(get(&endless.url("/")), "streamResponse", true);
    client.ok("http/request", params).await;
    let (all, error) = body(&mut client, "r").await;
    assert!(all.len() <= 1 << 20, "{}", all.len());
    assert!(error.unwrap().contains("limit of 1048576 bytes"));
}

/// Large responses are built one after the other, not all in memory.
#[tokio::test]
async fn concurrent_large_http_responses_all_arrive() {
    let (_server, mut client) = served(Transport::Websocket).await;
    let site = HttpSite::saying(answer("200 OK", "", vec![1; 20 << 20])).await;
    let mut sent = Vec::new();
    for n in 0..8 {
        let params = with(get(&site.url("/")), "requestId", n.to_string());
        sent.push(client.send("http/request", params).await);
    }
    for id in sent {
        let result = client.answer(id).await.unwrap();
        assert_eq!(bytes(&result["bodyBase64"]).len(), 20 << 20);
    }
}

#[tokio::test]
async fn http_requests_per_connection_are_limited() {
    let (_server, mut client) = served(Transport::Websocket).await;
    let site = HttpSite::start(|_, _stream| std::future::pending()).await;
    let mut ids = Vec::new();
    for n in 0..256 {
        let params = with(get(&site.url("/")), "requestId", n.to_string());
        ids.push(client.send("http/request", params).await);
    }
    let refused = client.refused("http/request", get(&site.url("/"))).await;
    assert!(
        refused.message.contains("limit of 256 http requests"),
        "{refused}"
    );
    client.ok("http/cancel", json!({"requestId": "7"})).await;
    // The slot is free when the request has ended; the response to `http/cancel` may arrive
    // earlier.
    client.answer(ids[7]).await.unwrap_err();
    let again = client.send("http/request", get(&site.url("/"))).await;
    client.ok("environment/status", Value::Null).await;
    assert!(!client.has_answer(again));
}

#[tokio::test]
async fn http_requests_to_metadata_addresses_are_denied() {
    let (_server, mut client) = served(Transport::Websocket).await;
    let target = "http://2852039166/latest";
    let site = HttpSite::saying(answer("302 Found", &format!("location: {target}\r\n"), "")).await;
    for url in [
        "http://169.254.169.254/latest/meta-data",
        "http://0xa9.0xfe.0xa9.0xfe/",
        "http://[::ffff:169.254.169.254]/",
        "http://[fe80::1]/",
        "http://metadata.google.internal/",
        &site.url("/"),
    ] {
        let refused = client.refused("http/request", get(url)).await;
        assert_eq!(refused.code, -32600, "{url}");
        assert!(
            refused.message.contains("is denied by the rule"),
            "{refused}"
        );
    }
}

/// Rules apply to the address that a name resolves to, so the name's owner cannot bypass them.
#[tokio::test]
async fn http_rules_apply_to_resolved_addresses() {
    let deny = r#"http.deny=["127.0.0.0/8", "::1"]"#;
    let (_server, mut client) = set(&[deny]).await;
    let site = HttpSite::saying(answer("200 OK", "", "")).await;
    let port = site.address().port();
    let by_name = format!("http://localhost:{port}/");
    for url in [&by_name, &site.url("/")] {
        let refused = client.refused("http/request", get(url)).await;
        assert!(
            refused.message.contains("is denied by the rule"),
            "{refused}"
        );
    }
    assert!(site.requests().is_empty());
    // A host that is not in `http.allow` gets no request; one that is, by name or by address, does.
    let (_server, mut client) = set(&[r#"http.allow=["example.com"]"#]).await;
    for url in [&by_name, &site.url("/")] {
        let refused = client.refused("http/request", get(url)).await;
        assert_eq!(refused.code, -32600);
        assert!(refused.message.contains("not among those"), "{refused}");
    }
    let (_server, mut client) = set(&[r#"http.allow=["localhost"]"#]).await;
    assert_eq!(
        client.ok("http/request", get(&by_name)).await["status"],
        200
    );
    client.refused("http/request", get(&site.url("/"))).await;
    let (_server, mut client) = set(&[r#"http.allow=["127.0.0.0/8"]"#]).await;
    assert_eq!(
        client.ok("http/request", get(&by_name)).await["status"],
        200
    );
    assert_eq!(
        client.ok("http/request", get(&site.url("/"))).await["status"],
        200
    );
    assert_eq!(site.requests().len(), 3);
}

#[tokio::test]
async fn http_bodies_are_decompressed_on_request() {
    let (_server, mut client) = set(&["http.max_response_bytes=64KiB"]).await;
    let packed = |encoding: &str, base64: &str| {
        let body = bytes(&json!(base64));
        let headers = format!("content-encoding: {encoding}\r\n");
        HttpSite::saying(answer("200 OK", &headers, body))
    };
    let named = |result: &Value, name: &str| {
        let headers = result["headers"].as_array().unwrap();
        headers.iter().any(|header| header["name"] == name)
    };
    for (encoding, base64) in [("gzip", GZIP), ("deflate", ZLIB)] {
        let site = packed(encoding, base64).await;
        let result = client.ok("http/request", get(&site.url("/"))).await;
        assert_eq!(result["bodyBase64"], base64);
        assert!(named(&result, "content-encoding"));
        let params = with(get(&site.url("/")), "decompress", true);
        let result = client.ok("http/request", params.clone()).await;
        assert_eq!(bytes(&result["bodyBase64"]), "hello ".repeat(20).as_bytes());
        assert!(!named(&result, "content-encoding") && !named(&result, "content-length"));
        client
            .ok("http/request", with(params, "streamResponse", true))
            .await;
        assert_eq!(
            body(&mut client, "r").await.0,
            "hello ".repeat(20).as_bytes()
        );
        let requests = site.requests();
        assert_eq!(requests[0].header("accept-encoding"), None);
        assert_eq!(requests[1].header("accept-encoding"), Some("gzip, deflate"));
    }
    let bomb = packed("gzip", BOMB).await;
    let params = with(get(&bomb.url("/")), "decompress", true);
    let failed = client.refused("http/request", params).await;
    assert!(failed.message.contains("limit of 65536 bytes"), "{failed}");
    let broken = packed("gzip", "AAAA").await;
    let params = with(get(&broken.url("/")), "decompress", true);
    let failed = client.refused("http/request", params).await;
    assert!(
        failed
            .message
            .starts_with("failed to read http/request response body"),
        "{failed}"
    );
}

#[tokio::test]
async fn http_proxy_is_used_except_for_loopback() {
    let proxy = HttpSite::saying(answer("200 OK", "x-proxied: 1\r\n", "by proxy")).await;
    let here = HttpSite::saying(answer("200 OK", "", "directly")).await;
    let by_environment = {
        let mut command = program();
        command.env(
            "http_proxy",
            proxy.url("").replace("http://", "http://me:it@"),
        );
        let mut subject = TestedServer::start(Transport::Websocket, command).await;
        let client = subject.session().await;
        (subject, client)
    };
    let setting = format!("http.proxy={}", proxy.url(""));
    let by_setting = set(&[&setting]).await;
    for (_server, mut client) in [by_environment, by_setting] {
        let result = client
            .ok("http/request", get("http://nowhere.test/x?y"))
            .await;
        assert_eq!(bytes(&result["bodyBase64"]), b"by proxy");
        let result = client.ok("http/request", get(&here.url("/"))).await;
        assert_eq!(bytes(&result["bodyBase64"]), b"directly");
        // The rules about names and literal addresses apply before the proxy is used.
        let url = "http://169.254.169.254/";
        assert_eq!(client.refused("http/request", get(url)).await.code, -32600);
    }
    let requests = proxy.requests();
    assert_eq!(requests.len(), 2);
    assert_eq!(requests[0].line, "GET http://nowhere.test/x?y HTTP/1.1");
    assert_eq!(
        requests[0].header("proxy-authorization"),
        Some("Basic bWU6aXQ=")
    );
    assert_eq!(requests[1].header("proxy-authorization"), None);
    let (_server, mut client) = set(&["http.proxy=none"]).await;
    client
        .refused("http/request", get("http://nowhere.test/"))
        .await;
    assert_eq!(proxy.requests().len(), 2);
}

/// A SOCKS5 proxy that connects every request to `to`; the receiver gets the requested hosts.
async fn socks(to: std::net::SocketAddr) -> (u16, tokio::sync::mpsc::UnboundedReceiver<String>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (sender, hosts) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let sender = sender.clone();
            tokio::spawn(async move {
                let mut head = [0; 2];
                stream.read_exact(&mut head).await.unwrap();
                let mut methods = vec![0; usize::from(head[1])];
                stream.read_exact(&mut methods).await.unwrap();
                stream.write_all(&[5, 0]).await.unwrap();
                let mut request = [0; 4];
                stream.read_exact(&mut request).await.unwrap();
                let host = match request[3] {
                    1 => {
                        let mut address = [0; 4];
                        stream.read_exact(&mut address).await.unwrap();
                        std::net::Ipv4Addr::from(address).to_string()
                    }
                    3 => {
                        let mut length = [0];
                        stream.read_exact(&mut length).await.unwrap();
                        let mut name = vec![0; usize::from(length[0])];
                        stream.read_exact(&mut name).await.unwrap();
                        String::from_utf8(name).unwrap()
                    }
                    kind => panic!("address of kind {kind}"),
                };
                stream.read_exact(&mut [0; 2]).await.unwrap();
                let _ = sender.send(host);
                stream
                    .write_all(&[5, 0, 0, 1, 0, 0, 0, 0, 0, 0])
                    .await
                    .unwrap();
                let mut there = tokio::net::TcpStream::connect(to).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut stream, &mut there).await;
            });
        }
    });
    (port, hosts)
}

#[tokio::test]
async fn socks5h_proxy_gets_names_and_socks5_gets_addresses() {
    let site = HttpSite::saying(answer("200 OK", "", "by socks")).await;
    let url = site.url("");
    let address = url.strip_prefix("http://").unwrap().parse().unwrap();
    let (port, mut hosts) = socks(address).await;
    let (_server, mut client) = set(&[&format!("http.proxy=socks5h://127.0.0.1:{port}")]).await;
    let result = client
        .ok("http/request", get("http://nowhere.test/x"))
        .await;
    assert_eq!(bytes(&result["bodyBase64"]), b"by socks");
    assert_eq!(hosts.recv().await.unwrap(), "nowhere.test");
    // `socks5` resolves names here, so the rules apply to the address.
    let (_server, mut client) = set(&[&format!("http.proxy=socks5://127.0.0.1:{port}")]).await;
    let failed = client
        .refused("http/request", get("http://nowhere.test/x"))
        .await;
    assert_eq!(failed.code, -32603);
    let result = client.ok("http/request", get("http://192.0.2.7/x")).await;
    assert_eq!(bytes(&result["bodyBase64"]), b"by socks");
    assert_eq!(hosts.recv().await.unwrap(), "192.0.2.7");
    let denied = client
        .refused("http/request", get("http://169.254.1.1/"))
        .await;
    assert_eq!(denied.code, -32600);
}

#[tokio::test]
async fn http_proxy_over_tls_is_used() {
    let (address, authority) = secure_site().await;
    let mut command = program();
    command.env("SSL_CERT_FILE", authority.path());
    command.env(
        "http_proxy",
        format!("https://localhost:{}", address.port()),
    );
    let mut subject = TestedServer::start(Transport::Websocket, command).await;
    let mut client = subject.session().await;
    let result = client
        .ok("http/request", get("http://nowhere.test/x"))
        .await;
    assert_eq!(bytes(&result["bodyBase64"]), b"secret");
}

#[tokio::test]
async fn server_does_not_start_with_an_invalid_http_rule() {
    let mut command = program();
    command.args([
        "--listen",
        "ws://127.0.0.1:0",
        "--set",
        r#"http.deny=["not a rule"]"#,
    ]);
    let output = timeout(TIMEOUT, command.output()).await.unwrap().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && stderr.contains("`not a rule`"),
        "{stderr}"
    );
}

/// A body that the client does not read stops at the site and is not buffered by the server.
#[tokio::test]
async fn slow_client_applies_backpressure_to_the_site() {
    let (_server, mut client) = served(Transport::Websocket).await;
    let sent = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let stuck = Arc::new(Notify::new());
    let (count, stalled) = (Arc::clone(&sent), Arc::clone(&stuck));
    let site = HttpSite::start(move |_, mut stream| {
        let (count, stalled) = (Arc::clone(&count), Arc::clone(&stalled));
        async move {
            say(&mut stream, b"HTTP/1.1 200 OK\r\n\r\n").await;
            let piece = [b'x'; 65536];
            loop {
                let write = stream.write_all(&piece);
                match timeout(std::time::Duration::from_secs(2), write).await {
                    Ok(Ok(())) => {
                        count.fetch_add(piece.len(), std::sync::atomic::Ordering::Relaxed)
                    }
                    Ok(Err(_)) => return,
                    Err(_) => break,
                };
            }
            stalled.notify_one();
            let _ = stream.read(&mut [0]).await;
        }
    })
    .await;
    let params = with(get(&site.url("/")), "streamResponse", true);
    client.send("http/request", params).await;
    timeout(TIMEOUT, stuck.notified()).await.unwrap();
    let sent = sent.load(std::sync::atomic::Ordering::Relaxed);
    assert!(
        sent < 64 << 20,
        "{sent} bytes were taken for a client that takes none"
    );
}

/// A site behind TLS with a certificate for `localhost`, and a file to trust it by.
async fn secure_site() -> (std::net::SocketAddr, tempfile::NamedTempFile) {
    let key = rcgen::KeyPair::generate().unwrap();
    let params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    let certificate = params.self_signed(&key).unwrap().pem();
    let secret = exec_server::Secret::from(key.serialize_pem());
    let tls = exec_server::transport::tls::TlsServer::in_memory(&certificate, &secret, None);
    let acceptor = tls.unwrap().acceptor();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            if let Ok(mut stream) = acceptor.accept(stream).await {
                let _ = stream.read(&mut [0; 4096]).await;
                let _ = stream.write_all(&answer("200 OK", "", "secret")).await;
                let _ = stream.shutdown().await;
            }
        }
    });
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), certificate).unwrap();
    (address, file)
}

#[tokio::test]
async fn http_certificates_are_verified_directly_and_through_a_tunnel() {
    let (address, authority) = secure_site().await;
    // Forwards every tunnel to the site, whatever host it names.
    let proxy = HttpSite::start(move |request, mut stream| async move {
        if request.line.starts_with("CONNECT ") {
            let mut there = tokio::net::TcpStream::connect(address).await.unwrap();
            say(&mut stream, b"HTTP/1.1 200 OK\r\n\r\n").await;
            let _ = tokio::io::copy_bidirectional(&mut stream, &mut there).await;
        }
    })
    .await;
    let mut command = program();
    command.env("SSL_CERT_FILE", authority.path());
    command.env("HTTPS_PROXY", proxy.url(""));
    let mut subject = TestedServer::start(Transport::Websocket, command).await;
    let mut client = subject.session().await;
    let at = |host: &str| get(&format!("https://{host}:{}/", address.port()));
    let result = client.ok("http/request", at("localhost")).await;
    assert_eq!(bytes(&result["bodyBase64"]), b"secret");
    let failed = client.refused("http/request", at("127.0.0.1")).await;
    assert_eq!(failed.code, -32603);
    assert!(failed.message.contains("certificate"), "{failed}");
    assert!(proxy.requests().is_empty());
    // The same certificate is rejected through the tunnel for another host name.
    let failed = client.refused("http/request", at("elsewhere.test")).await;
    assert!(failed.message.contains("certificate"), "{failed}");
    let line = format!("CONNECT elsewhere.test:{} HTTP/1.1", address.port());
    assert_eq!(proxy.requests()[0].line, line);
    // No tunnel is requested to a host that the rules forbid.
    let denied = client.refused("http/request", at("169.254.1.1")).await;
    assert_eq!(denied.code, -32600);
    assert_eq!(proxy.requests().len(), 1);
}
