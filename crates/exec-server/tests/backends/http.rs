//! HTTP requests from this process and from a server: the results are the same.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use exec_server::http::{ExecutorHttp, HttpRequest};
use exec_server::http_client::{HttpClient, HttpConfig};
use exec_server::{
    ExecServer, ExecServerClient, ExecServerConfig, ExecServerError, LocalHttp,
    RemoteExecServerConnectArgs, in_process,
};
use exec_server_testkit::proc::TIMEOUT;
use exec_server_testkit::server::ServerProcess;
use exec_server_testkit::site::{HttpSite, answer, say};
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// A name, a backend that makes requests, and the value that keeps it alive.
type HttpSubject = (&'static str, Box<dyn ExecutorHttp>, Box<dyn Any>);

/// Each backend has the variable `OWN` in its environment.
async fn subjects() -> Vec<HttpSubject> {
    let environment: BTreeMap<_, _> = [("OWN".to_owned(), "value".to_owned())].into();
    let config = HttpConfig {
        environment: environment.clone(),
        ..HttpConfig::default()
    };
    let local = LocalHttp::new(HttpClient::new(config));
    let server = ExecServer::new(ExecServerConfig {
        environment,
        ..ExecServerConfig::default()
    });
    let server = server.unwrap();
    let inside = in_process(&server).await.unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_exec-server"));
    command.env("OWN", "value");
    let process = ServerProcess::start(command).await;
    let args = RemoteExecServerConnectArgs::new(process.url(), "test");
    let remote = ExecServerClient::connect(args).await.unwrap();
    vec![
        ("local", Box::new(local), Box::new(())),
        ("in process", Box::new(inside), Box::new(server)),
        ("websocket", Box::new(remote), Box::new(process)),
    ]
}

#[tokio::test]
async fn http_responses_are_the_same_on_every_backend() {
    let site = HttpSite::saying(answer(
        "201 Made",
        "x-a: 1\r\nx-b: 2\r\nx-a: 3\r\n",
        "hello",
    ))
    .await;
    for (name, http, _keep) in subjects().await {
        let mut request = HttpRequest::get(site.url("/path"))
            .header("x-plain", "p")
            .header_from_env("authorization", "Bearer ", "OWN");
        request.method = "POST".to_owned();
        request.body = Some("body".into());
        let got = http.fetch(request.clone()).await.unwrap();
        assert_eq!((got.status, &*got.body), (201, &b"hello"[..]), "{name}");
        let values: Vec<&str> = got
            .headers
            .iter()
            .filter(|header| header.name == "x-a")
            .map(|header| &*header.value)
            .collect();
        assert_eq!(values, ["1", "3"], "{name}");
        let mut got = http.open(request).await.unwrap();
        let mut all = Vec::new();
        while let Some(piece) = got.body.chunk().await.unwrap() {
            all.extend_from_slice(&piece);
        }
        assert_eq!((got.status, &*all), (201, &b"hello"[..]), "{name}");
    }
    let requests = site.requests();
    assert_eq!(requests.len(), 6);
    for request in requests {
        assert_eq!(request.header("authorization"), Some("Bearer value"));
        assert_eq!(
            (&*request.line, &*request.body),
            ("POST /path HTTP/1.1", &b"body"[..])
        );
    }
}

#[tokio::test]
async fn http_errors_have_the_same_codes_on_every_backend() {
    let cut = HttpSite::saying("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort").await;
    for (name, http, _keep) in subjects().await {
        let code = |url: &str| {
            let request = HttpRequest::get(url);
            async { http.fetch(request).await.unwrap_err().code() }
        };
        assert_eq!(code("ftp://x/").await, Some(-32602), "{name}");
        assert_eq!(
            code("http://169.254.169.254/").await,
            Some(-32600),
            "{name}"
        );
        assert_eq!(code(&cut.url("/")).await, Some(-32603), "{name}");
        let mut got = http.open(HttpRequest::get(cut.url("/"))).await.unwrap();
        assert_eq!(got.body.chunk().await.unwrap().unwrap(), "short", "{name}");
        let error: ExecServerError = got.body.chunk().await.unwrap_err();
        assert!(
            error.to_string().contains("response body"),
            "{name}: {error}"
        );
    }
}

/// A body of many megabytes is complete, also for a slow consumer, and dropping it ends the
/// request.
#[tokio::test]
async fn large_http_bodies_are_complete_and_dropped_ones_end() {
    const BYTES: usize = 40 << 20;
    let left = Arc::new(Semaphore::new(0));
    let reported = Arc::clone(&left);
    let site = HttpSite::start(move |request, mut stream| {
        let reported = Arc::clone(&reported);
        async move {
            if request.path() == "/large" {
                let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {BYTES}\r\n\r\n");
                say(&mut stream, head.as_bytes()).await;
                say(&mut stream, &vec![7; BYTES]).await;
            } else if request.path() == "/endless" {
                say(&mut stream, b"HTTP/1.1 200 OK\r\n\r\n").await;
                while stream.write_all(&[7; 65536]).await.is_ok() {}
                reported.add_permits(1);
            } else {
                // Sends nothing until the client disconnects.
                let _ = tokio::io::AsyncReadExt::read(&mut stream, &mut [0]).await;
                reported.add_permits(1);
            }
        }
    })
    .await;
    let one_left = || async {
        let one = timeout(TIMEOUT, left.acquire()).await.unwrap();
        one.unwrap().forget();
    };
    for (name, http, _keep) in subjects().await {
        let mut got = http
            .open(HttpRequest::get(site.url("/large")))
            .await
            .unwrap();
        tokio::time::sleep(Duration::from_millis(200)).await;
        let mut bytes = 0;
        while let Some(piece) = got.body.chunk().await.unwrap() {
            bytes += piece.len();
        }
        assert_eq!(bytes, BYTES, "{name}");
        let mut got = http
            .open(HttpRequest::get(site.url("/endless")))
            .await
            .unwrap();
        assert!(got.body.chunk().await.unwrap().is_some());
        drop(got);
        one_left().await;
        let silent = http.fetch(HttpRequest::get(site.url("/silent")));
        let waited = timeout(Duration::from_millis(300), silent).await;
        assert!(waited.is_err(), "{name}");
        one_left().await;
    }
}
