//! Connections that are refused or leave: after many of them, as many bytes are allocated as before.

use std::sync::Arc;
use std::time::Duration;

use exec_server::auth::{Auth, CapabilityToken, Scopes};
use exec_server::transport::tls::{TlsClientOptions, TlsServer};
use exec_server::{
    AdmissionRules, ConnectionGuard, ExecBackend as _, ExecServer, ExecServerClient,
    ExecServerClientConnectOptions, ExecServerConfig, Listener, RemoteExecServerConnectArgs,
    Secret, SessionLifetime,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::leaks::{leaves_nothing, no_objects_are_left, sh};
use super::{config, eventually, serially};

#[tokio::test]
async fn sessions_that_expire_leave_no_memory() {
    let _one = serially().await;
    let config = ExecServerConfig {
        detach_grace: Duration::from_millis(5),
        ..config()
    };
    let server = ExecServer::new(config).unwrap();
    leaves_nothing(40, async |number| {
        let (here, there) = exec_server::transport::Link::pair();
        let name = format!("peer {number}");
        tokio::spawn(server.serve(there, name, SessionLifetime::Resumable));
        let options = ExecServerClientConnectOptions::new("test");
        let client = ExecServerClient::from_link(here, options).await.unwrap();
        client.start(sh(number, "sleep 600")).await.unwrap();
        drop(client);
        eventually("the session expires", || match server.session_count() {
            0 => Ok(()),
            count => Err(count),
        })
        .await;
    })
    .await;
    no_objects_are_left(&server).await;
    assert_eq!(server.executor().live(), 0);
}

#[tokio::test]
async fn refused_connections_leave_no_memory() {
    let _one = serially().await;
    let server = ExecServer::new(config()).unwrap();
    let token = Secret::from("right".to_owned());
    let rules = AdmissionRules {
        auth: Auth::Capability(vec![CapabilityToken::new("test", &token, Scopes::ALL)]),
        ..AdmissionRules::default()
    };
    let listener = Listener::tcp("127.0.0.1:0".parse().unwrap(), false)
        .await
        .unwrap();
    let address = listener.url().to_string().replace("ws://", "");
    let listener = listener.guarded(Arc::new(ConnectionGuard::new(rules)));
    tokio::spawn(listener.serve(server.clone()));
    let exchange = async |request: &str| {
        let mut stream = TcpStream::connect(&address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut response = Vec::new();
        // The server may reset a connection with unread data.
        drop(stream.read_to_end(&mut response).await);
    };
    leaves_nothing(60, async |number| match number % 3 {
        0 => exchange("GET / HTTP/1.1\r\nHost: x\r\n\r\n").await,
        1 => exchange("nonsense\r\n\r\n").await,
        _ => {
            exchange(
                "GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\
                 Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
            )
            .await;
        }
    })
    .await;
    assert_eq!(server.connections(), 0);
}

#[tokio::test]
async fn connections_over_tls_leave_no_memory() {
    let _one = serially().await;
    let key = rcgen::KeyPair::generate().unwrap();
    let params = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    let certificate = params.self_signed(&key).unwrap();
    let secret = Secret::from(key.serialize_pem());
    let tls = TlsServer::in_memory(&certificate.pem(), &secret, None).unwrap();
    let mut trusted = TlsClientOptions::default();
    trusted.pin = Some(tls.pin());
    let server = ExecServer::new(config()).unwrap();
    let listener = Listener::tcp("127.0.0.1:0".parse().unwrap(), false)
        .await
        .unwrap()
        .with_tls(Arc::new(tls));
    let url = listener.url().to_string();
    tokio::spawn(listener.serve(server.clone()));
    leaves_nothing(30, async |number| {
        let mut args = RemoteExecServerConnectArgs::new(url.clone(), "test");
        if number % 2 == 0 {
            args.tls = trusted.clone();
            let client = ExecServerClient::connect(args).await.unwrap();
            client.list().await.unwrap();
            client.end_session().await.unwrap();
        } else {
            // The client does not trust the certificate.
            ExecServerClient::connect(args).await.unwrap_err();
        }
    })
    .await;
    eventually("connections end", || match server.connections() {
        0 => Ok(()),
        count => Err(count),
    })
    .await;
}
