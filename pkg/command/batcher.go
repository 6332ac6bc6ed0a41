package command

import (
	"context"
	"sync"
)

// batcher lets batches form by back-pressure: a taker takes the first item at once, and with it whatever has come
// while it was busy. There is no linger, so a lone item never waits.
type batcher[T any] struct {
	mu    sync.Mutex
	items []T
	wake  chan struct{}
}

func newBatcher[T any]() *batcher[T] { return &batcher[T]{wake: make(chan struct{}, 1)} }

func (b *batcher[T]) put(items ...T) {
	b.mu.Lock()
	b.items = append(b.items, items...)
	b.mu.Unlock()
	b.signal()
}

func (b *batcher[T]) signal() {
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// take appends up to limit items to buf, waiting for the first. It returns nil when ctx ends.
func (b *batcher[T]) take(ctx context.Context, limit int, buf []T) []T {
	for {
		if ctx.Err() != nil {
			return nil
		}
		b.mu.Lock()
		n := min(limit, len(b.items))
		if n > 0 {
			buf = append(buf, b.items[:n]...)
			rest := copy(b.items, b.items[n:])
			clear(b.items[rest:])
			b.items = b.items[:rest]
			b.mu.Unlock()
			if rest > 0 {
				b.signal() // for the other taker
			}
			return buf
		}
		b.mu.Unlock()
		select {
		case <-b.wake:
		case <-ctx.Done():
			return nil
		}
	}
}

// drain takes all there is without waiting.
func (b *batcher[T]) drain() []T {
	b.mu.Lock()
	defer b.mu.Unlock()
	items := b.items
	b.items = nil
	return items
}

// fifo is a queue whose memory is used again.
type fifo[T any] struct {
	items []T
	head  int
}

func (q *fifo[T]) len() int { return len(q.items) - q.head }

func (q *fifo[T]) push(x T) {
	if q.head > 64 && q.head > len(q.items)/2 {
		n := copy(q.items, q.items[q.head:])
		clear(q.items[n:])
		q.items, q.head = q.items[:n], 0
	}
	q.items = append(q.items, x)
}

func (q *fifo[T]) peek() T { return q.items[q.head] }

func (q *fifo[T]) pop() T {
	var zero T
	x := q.items[q.head]
	q.items[q.head] = zero
	q.head++
	if q.head == len(q.items) {
		q.items, q.head = q.items[:0], 0
	}
	return x
}
