package observe

import (
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"
)

// connections shows the state of a process's connections.
type connections struct {
	pool *pgxpool.Pool
	nc   *nats.Conn
}

// Connections are metrics of a pool and a NATS connection.
func Connections(pool *pgxpool.Pool, nc *nats.Conn) prometheus.Collector {
	return connections{pool, nc}
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("taskrelay_"+name, help, labels, nil)
}

var (
	poolConnections = desc("pgxpool_connections", "Connections to Postgres of the process's pool, by state.", "state")
	poolMax         = desc("pgxpool_max_connections", "Connections the pool may open.")
	poolAcquires    = desc("pgxpool_acquires_total", "Times a connection was taken from the pool.")
	poolWaits       = desc("pgxpool_empty_acquires_total", "Of these, times when none was idle and one had to be waited for.")
	poolWaited      = desc("pgxpool_acquire_wait_seconds_total", "Time spent on taking connections from the pool.")
	natsConnected   = desc("nats_connected", "1 while the process is connected to NATS.")
	natsReconnects  = desc("nats_reconnects_total", "Times the connection to NATS was made again.")
)

func (c connections) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{poolConnections, poolMax, poolAcquires, poolWaits, poolWaited, natsConnected, natsReconnects} {
		ch <- d
	}
}

func (c connections) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	counter := func(d *prometheus.Desc, v float64) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, v)
	}
	s := c.pool.Stat()
	gauge(poolConnections, float64(s.IdleConns()), "idle")
	gauge(poolConnections, float64(s.AcquiredConns()), "in_use")
	gauge(poolConnections, float64(s.ConstructingConns()), "connecting")
	gauge(poolMax, float64(s.MaxConns()))
	counter(poolAcquires, float64(s.AcquireCount()))
	counter(poolWaits, float64(s.EmptyAcquireCount()))
	counter(poolWaited, s.AcquireDuration().Seconds())
	connected := 0.0
	if c.nc.IsConnected() {
		connected = 1
	}
	gauge(natsConnected, connected)
	counter(natsReconnects, float64(c.nc.Stats().Reconnects))
}
