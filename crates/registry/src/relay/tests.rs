use std::sync::atomic::AtomicU32;

use exec_server_relay::EndpointLimits;
use exec_server_relay::frame::{self, FrameBody, Transmit};
use exec_server_relay::noise::StaticKeys;

use super::*;
use exec_server_transport::frame::WebsocketRole;

/// Minimal rendezvous server: one executor, any number of harnesses, and sockets that a test can
/// cut.
#[derive(Default)]
struct TestRendezvous {
    routes: Mutex<TestRoutes>,
    dialled: AtomicU32,
}

#[derive(Default)]
struct TestRoutes {
    executor: Option<mpsc::Sender<Vec<u8>>>,
    harnesses: HashMap<String, mpsc::Sender<Vec<u8>>>,
    /// One entry for each socket; a notification cuts it.
    cuts: Vec<(bool, Arc<Notify>)>,
}

impl TestRendezvous {
    fn dial(self: &Arc<Self>, executor: bool) -> Link {
        self.dialled.fetch_add(1, Ordering::Relaxed);
        let (client, server) = tokio::io::duplex(256 << 10);
        let (reader, writer) = tokio::io::split(server);
        let link = Link::websocket(WebsocketRole::Server, reader, writer, Vec::new());
        let cut = Arc::new(Notify::new());
        let (sender, receiver) = mpsc::channel(8);
        let mut routes = self.routes.lock();
        routes.cuts.push((executor, Arc::clone(&cut)));
        if executor {
            routes.executor = Some(sender.clone());
        }
        drop(routes);
        let rendezvous = Arc::clone(self);
        tokio::spawn(async move {
            let Link { incoming, outgoing } = link;
            tokio::select! {
                () = rendezvous.forward(executor, sender.clone(), incoming) => {}
                () = deliver(receiver, outgoing) => {}
                () = cut.notified() => {}
            }
            rendezvous.leave(executor, &sender).await;
        });
        let (reader, writer) = tokio::io::split(client);
        Link::websocket(WebsocketRole::Client, reader, writer, Vec::new())
    }

    async fn forward(
        &self,
        executor: bool,
        own: mpsc::Sender<Vec<u8>>,
        mut incoming: LinkReceiver,
    ) {
        while let Ok(Some(event)) = incoming.recv_raw().await {
            let RawEvent::Message { bytes, text: false } = event else {
                continue;
            };
            let frame = frame::decode(bytes).unwrap();
            let to = {
                let mut routes = self.routes.lock();
                if executor {
                    routes.harnesses.get(frame.stream_id.as_ref()).cloned()
                } else {
                    if matches!(frame.body, FrameBody::Resume { .. }) {
                        let id = frame.stream_id.clone().into_owned();
                        routes.harnesses.insert(id, own.clone());
                    }
                    routes.executor.clone()
                }
            };
            if let Some(to) = to {
                let _ = to.send(bytes.to_vec()).await;
            }
        }
    }

    async fn leave(&self, executor: bool, own: &mpsc::Sender<Vec<u8>>) {
        let notices = {
            let mut routes = self.routes.lock();
            if executor {
                if !routes
                    .executor
                    .as_ref()
                    .is_some_and(|e| e.same_channel(own))
                {
                    return;
                }
                routes.executor = None;
                let all = routes.harnesses.iter();
                all.map(|(id, to)| (id.clone(), to.clone(), EndReason::ExecutorDetached))
                    .collect::<Vec<_>>()
            } else {
                let gone = routes.harnesses.extract_if(|_, to| to.same_channel(own));
                let gone: Vec<_> = gone.map(|(id, _)| id).collect();
                let executor = routes.executor.clone();
                gone.into_iter()
                    .filter_map(|id| Some((id, executor.clone()?, EndReason::HarnessDetached)))
                    .collect()
            }
        };
        for (id, to, reason) in notices {
            let _ = to
                .send(Transmit::reset(&id, reason.as_str()).to_vec())
                .await;
        }
    }

    /// Cuts all sockets of one side; returns how many there were.
    fn cut(&self, executor: bool) -> usize {
        let mut routes = self.routes.lock();
        let cut: Vec<_> = routes
            .cuts
            .extract_if(.., |(side, _)| *side == executor)
            .collect();
        for (_, socket) in &cut {
            socket.notify_one();
        }
        cut.len()
    }

    fn dialler(
        self: &Arc<Self>,
        executor: bool,
    ) -> impl FnMut() -> std::future::Ready<Result<Link, RelayDialError>> + Send + use<> {
        let rendezvous = Arc::clone(self);
        move || std::future::ready(Ok(rendezvous.dial(executor)))
    }
}

async fn deliver(mut receiver: mpsc::Receiver<Vec<u8>>, mut outgoing: LinkSender) {
    while let Some(frame) = receiver.recv().await {
        outgoing.push_binary([&frame, &[]]);
        if outgoing.flush().await.is_err() {
            return;
        }
    }
}

struct RelayFixture {
    rendezvous: Arc<TestRendezvous>,
    identity: StaticKeys,
    accepted: mpsc::Receiver<RelayStream>,
    /// Aborted when the stage is dropped.
    _executor: JoinSet<()>,
}

impl RelayFixture {
    fn new() -> Self {
        let rendezvous = Arc::new(TestRendezvous::default());
        let identity = StaticKeys::generate(&mut system_entropy);
        let config = RelayExecutorConfig {
            environment_id: "env".into(),
            registration_id: "reg".into(),
            identity: identity.clone(),
            limits: EndpointLimits::default(),
        };
        let (sender, accepted) = mpsc::channel(16);
        let admit = |ask: StreamRequest| async move {
            match ask.authorization.reveal() {
                "good" => Ok(()),
                _ => Err(EndReason::AuthorizationRefused),
            }
        };
        let mut executor = JoinSet::new();
        let mut dial = rendezvous.dialler(true);
        let dial = move || {
            let dialled = dial();
            async move {
                let link = dialled.await?;
                let registration_id = "reg".into();
                Ok(ExecutorAttachment {
                    link,
                    registration_id,
                    cut: Default::default(),
                })
            }
        };
        executor.spawn(async move {
            let error = serve(config, dial, admit, sender).await;
            panic!("{error}");
        });
        Self {
            rendezvous,
            identity,
            accepted,
            _executor: executor,
        }
    }

    async fn open_with(
        &self,
        authorization: &str,
        limits: EndpointLimits,
    ) -> Result<RelayStream, OpenError> {
        // Wait for the executor to dial; in production the registry reports an offline executor.
        while self.rendezvous.routes.lock().executor.is_none() {
            tokio::task::yield_now().await;
        }
        let config = RelayHarnessConfig {
            environment_id: "env".into(),
            registration_id: "reg".into(),
            stream_id: uuid::Uuid::new_v4().to_string(),
            identity: StaticKeys::generate(&mut system_entropy),
            executor: self.identity.public_key().clone(),
            authorization: Authorization::new(authorization).unwrap(),
            limits,
        };
        open(config, self.rendezvous.dialler(false)).await
    }

    async fn open(&mut self) -> (RelayStream, RelayStream) {
        let here = self
            .open_with("good", EndpointLimits::default())
            .await
            .unwrap();
        let there = self.accepted.recv().await.unwrap();
        assert_eq!(here.stream_id, there.stream_id);
        (here, there)
    }
}

async fn send(link: &mut LinkSender, message: &[u8]) {
    link.push_message(message.len(), |out| out.extend_from_slice(message));
    link.flush().await.unwrap();
}

async fn receive(link: &mut LinkReceiver) -> Option<Vec<u8>> {
    match link.recv_raw().await.unwrap()? {
        RawEvent::Message { bytes, .. } => Some(bytes.to_vec()),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn many_streams_share_one_executor_socket() {
    let mut stage = RelayFixture::new();
    let mut pairs = Vec::new();
    for _ in 0..5 {
        pairs.push(stage.open().await);
    }
    for (n, (here, there)) in pairs.iter_mut().enumerate() {
        assert_eq!(here.mode, Mode::Reliable);
        assert!(there.harness.is_some());
        send(&mut here.link.outgoing, format!("ping {n}\n").as_bytes()).await;
        let got = receive(&mut there.link.incoming).await.unwrap();
        assert_eq!(got, format!("ping {n}\n").as_bytes());
        send(&mut there.link.outgoing, b"pong").await;
        assert_eq!(receive(&mut here.link.incoming).await.unwrap(), b"pong");
    }
    assert_eq!(stage.rendezvous.dialled.load(Ordering::Relaxed), 6);
}

#[tokio::test]
async fn refused_harness_receives_the_reason() {
    let stage = RelayFixture::new();
    let refused = stage.open_with("bad", EndpointLimits::default()).await;
    assert!(matches!(
        refused,
        Err(OpenError::Refused(EndReason::AuthorizationRefused))
    ));
}

#[tokio::test]
async fn both_ends_report_the_end_after_all_messages_are_delivered() {
    let mut stage = RelayFixture::new();
    let (mut here, mut there) = stage.open().await;
    for n in 0..100_u8 {
        send(&mut here.link.outgoing, &[n; 5000]).await;
    }
    let ended = here.ended();
    drop(here);
    for n in 0..100_u8 {
        assert_eq!(receive(&mut there.link.incoming).await.unwrap(), [n; 5000]);
    }
    assert_eq!(receive(&mut there.link.incoming).await, None);
    assert_eq!(there.ended().await, EndReason::Closed);
    assert_eq!(ended.await, EndReason::Closed);
}

/// Sends numbered messages while sockets are cut, and checks each message.
async fn survive(cut_executor: bool) {
    const COUNT: u32 = 400;
    let mut stage = RelayFixture::new();
    let (mut here, mut there) = stage.open().await;
    let mut cuts = 0;
    let sender = async {
        for n in 0..COUNT {
            let mut message = vec![n as u8; 40_000];
            message[..4].copy_from_slice(&n.to_be_bytes());
            send(&mut there.link.outgoing, &message).await;
        }
    };
    let receiver = async {
        for n in 0..COUNT {
            let message = receive(&mut here.link.incoming).await.unwrap();
            assert_eq!(message[..4], n.to_be_bytes());
            assert_eq!(message.len(), 40_000);
            if n % 100 == 50 {
                cuts += stage.rendezvous.cut(cut_executor);
            }
        }
    };
    tokio::join!(sender, receiver);
    assert_eq!(cuts, 4, "each cut was of a socket in use");
    send(&mut here.link.outgoing, b"done").await;
    assert_eq!(receive(&mut there.link.incoming).await.unwrap(), b"done");
}

#[tokio::test(start_paused = true)]
async fn stream_survives_loss_of_harness_sockets() {
    survive(false).await;
}

#[tokio::test(start_paused = true)]
async fn stream_survives_loss_of_executor_sockets() {
    survive(true).await;
}

#[tokio::test]
async fn stream_without_acknowledgements_ends_with_its_socket() {
    let mut stage = RelayFixture::new();
    let mut limits = EndpointLimits::default();
    limits.acknowledge = false;
    let mut here = stage.open_with("good", limits).await.unwrap();
    let there = stage.accepted.recv().await.unwrap();
    assert_eq!(here.mode, Mode::Compatible);
    stage.rendezvous.cut(false);
    assert_eq!(receive(&mut here.link.incoming).await, None);
    assert_eq!(here.ended().await, EndReason::SocketLost);
    assert_eq!(there.ended().await, EndReason::HarnessDetached);
}

#[tokio::test]
async fn reader_that_stops_blocks_only_its_own_sender() {
    let mut stage = RelayFixture::new();
    let (mut slow, mut slow_there) = stage.open().await;
    let (mut quick, mut quick_there) = stage.open().await;
    let flood = async {
        for _ in 0..1000 {
            send(&mut slow_there.link.outgoing, &[1; 100_000]).await;
        }
    };
    let mut flood = pin!(flood);
    for _ in 0..200 {
        let echo = async {
            send(&mut quick.link.outgoing, b"ping").await;
            assert_eq!(
                receive(&mut quick_there.link.incoming).await.unwrap(),
                b"ping"
            );
        };
        tokio::select! {
            () = &mut flood => panic!("a hundred megabytes fit nowhere"),
            () = echo => {}
        }
    }
    let drain = async {
        for _ in 0..1000 {
            assert_eq!(
                receive(&mut slow.link.incoming).await.unwrap().len(),
                100_000
            );
        }
    };
    tokio::join!(flood, drain);
}

#[test]
fn pauses_grow_and_a_long_lived_socket_resets_them() {
    let mut redial = RedialSchedule::default();
    assert_eq!(redial.pause(0), Duration::ZERO);
    let mut pauses = Vec::new();
    for _ in 0..10 {
        redial.failed();
        assert_eq!(redial.pause(0) * 2, redial.pause(u32::MAX));
        pauses.push(redial.pause(u32::MAX).as_millis());
    }
    assert_eq!(
        pauses,
        [50, 100, 200, 400, 800, 1600, 3200, 6400, 12_800, 15_000]
    );
    redial.lived(Duration::from_secs(10));
    assert_eq!(redial.pause(0), Duration::ZERO);
    // A limited number of short-lived sockets is replaced without a pause.
    for _ in 1..RedialSchedule::SPARE {
        redial.lived(Duration::ZERO);
        assert_eq!(redial.pause(0), Duration::ZERO);
    }
    redial.lived(Duration::ZERO);
    assert!(
        redial.pause(0) > Duration::ZERO,
        "who hangs up all the time is not dialled all the time"
    );
    for _ in 0..100 {
        redial.lived(RedialSchedule::REGAIN);
        assert_eq!(redial.pause(0), Duration::ZERO);
    }
}
